"""How likely a model holds the ends of texts; every token reads the others as decode would."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jkvq.cache.layout import KVCache, empty_cache, fill_table, pages_for, table_columns
from jkvq.cache.shape import CacheShape
from jkvq.cache.sizes import power_of_two
from jkvq.engine.drawing.scores import logprob_of
from jkvq.engine.forward import forward
from jkvq.evaluation.subjects import CHUNK
from jkvq.llm import LLM
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params, logits
from jkvq.support.errors import UserError

# Programs are compiled for sizes: texts are padded to 2^k tokens, and batches of them to 2^k rows.
_SHORTEST = 32
_ROWS = {"cpu": 8, "gpu": 64}
_TOKENS = 16384  # of a batch, unless a single text has more
_LEAST_SCORED, _MOST_SCORED = 16, 256  # tokens whose distributions are computed at once


class Ending(NamedTuple):
    """The last tokens of a text, to be scored.

    inputs: what the model reads: the text without its last token.
    targets: the text's last tokens, at most as many as there are inputs.
    """

    inputs: tuple[int, ...]
    targets: Sequence[int]


class Likelihood(NamedTuple):
    """What the model holds of an ending.

    log: the sum of its tokens' log-probabilities.
    greedy: each of its tokens is the most likely one.
    """

    log: float
    greedy: bool


class _Target(NamedTuple):
    """A token to be scored: the one after an input, in a row of the batch."""

    row: int
    position: int
    token: int
    ending: int


def likelihoods(llm: LLM, endings: Sequence[Ending]) -> Iterator[tuple[int, Likelihood]]:
    """The place of every ending and its likelihood, those of long texts first.

    Texts of about one length run side by side. Endings with the same inputs, such as the letters of
    a multiple choice, share a row.
    """
    sharing: dict[tuple[int, ...], list[int]] = {}
    for place, ending in enumerate(endings):
        sharing.setdefault(ending.inputs, []).append(place)
    most = _ROWS.get(jax.default_backend(), _ROWS["cpu"])
    longest_first = sorted(sharing, key=len, reverse=True)
    for length, group in itertools.groupby(longest_first, lambda text: _padded(len(text))):
        texts, rows = list(group), max(1, min(most, _TOKENS // length))
        for start in range(0, len(texts), rows):
            batch = texts[start : start + rows]
            targets = [
                _Target(row, position, token, place)
                for row, text in enumerate(batch)
                for place in sharing[text]
                for position, token in enumerate(
                    endings[place].targets, len(text) - len(endings[place].targets)
                )
            ]
            yield from _score(llm, batch, length, targets)


def _padded(tokens: int) -> int:
    return power_of_two(tokens, _SHORTEST)


def _score(
    llm: LLM, batch: list[tuple[int, ...]], length: int, targets: list[_Target]
) -> Iterator[tuple[int, Likelihood]]:
    """Runs texts of at most ``length`` tokens, and adds up what their endings have."""
    log = dict.fromkeys((target.ending for target in targets), 0.0)
    greedy = dict.fromkeys(log, True)
    rows, width = power_of_two(len(batch)), min(length, CHUNK)
    cache = _empty(llm, rows, length)
    for start in range(0, max(map(len, batch)), width):
        tokens, count = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
        for row, text in enumerate(batch):
            now = text[start : start + width]
            tokens[row, : len(now)], count[row] = now, len(now)
        hidden, cache = forward(
            *(llm.config, llm.params, llm.basis, cache),
            *(jax.device_put(tokens), jax.device_put(count)),
            phase="forced",
            implementation=llm.implementation,
        )
        here = [target for target in targets if start <= target.position < start + width]
        for first in range(0, len(here), _MOST_SCORED):
            part = here[first : first + _MOST_SCORED]
            for target, found in zip(part, _of_targets(llm, hidden, part, start), strict=True):
                log[target.ending] += found.log
                greedy[target.ending] &= found.greedy
    for place in log:
        if np.isnan(log[place]):
            raise UserError(
                "the model's scores are not numbers (NaN): its weights are damaged, or the dtype "
                "is too narrow for them"
            )
        yield place, Likelihood(log[place], greedy[place])


def _empty(llm: LLM, rows: int, length: int) -> KVCache:
    """A cache for so many texts of at most ``length`` tokens."""
    spec, own = llm.spec, pages_for(length, llm.spec)
    pages = [range(1 + row * own, 1 + (row + 1) * own) for row in range(rows)]
    table = jax.device_put(fill_table(spec, pages, table_columns(length, spec)))
    return empty_cache(spec, CacheShape.of(llm.config), 1 + rows * own, table)


def _of_targets(
    llm: LLM, hidden: Float[Array, "B T D"], targets: list[_Target], start: int
) -> list[Likelihood]:
    """Of each token, in a chunk that begins with input ``start``."""
    places = np.zeros((3, power_of_two(len(targets), _LEAST_SCORED)), np.int32)
    for index, target in enumerate(targets):
        places[:, index] = target.row, target.position - start, target.token
    log, greedy = _chosen(llm.config, llm.params, hidden, *map(jax.device_put, places))
    found = zip(np.asarray(log).tolist(), np.asarray(greedy).tolist(), strict=True)
    return [Likelihood(*each) for each in itertools.islice(found, len(targets))]


@functools.partial(jax.jit, static_argnames="config")
def _chosen(
    config: ModelConfig,
    params: Params,
    hidden: Float[Array, "B T D"],
    row: Int[Array, " S"],
    position: Int[Array, " S"],
    token: Int[Array, " S"],
) -> tuple[Float[Array, " S"], Bool[Array, " S"]]:
    """Log-probability of tokens, and whether each is the most likely."""
    scores = logits(config, params, hidden[row, position])
    return logprob_of(scores, token), scores.argmax(-1) == token
