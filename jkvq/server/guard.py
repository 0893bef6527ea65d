"""The guard: whether the cache still serves the texts that people ask for.

Some of the texts that have ended are run again when nobody waits, token by token as they were, with
the cache that is served and with one of 16 bits. Noted is the KL of the next token between the two,
in the mean over an answer, and where the most likely token first was another one.
"""

import contextlib
import dataclasses
import logging
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jkvq.cache.calibrated import Calibration, methods_for
from jkvq.cache.footprint import bits_per_element
from jkvq.cache.layout import KVCache
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec import CacheSpec
from jkvq.cache.specs.spec_text import parse_spec, spec_text
from jkvq.defaults import PLAIN_CACHE
from jkvq.evaluation.perplexity import log_probabilities, token_losses
from jkvq.evaluation.subjects import Cached
from jkvq.llm import LLM, with_cache
from jkvq.models.model import Model
from jkvq.server.metrics import GuardMetrics
from jkvq.support.errors import UserError

LOG = logging.getLogger("jkvq.server")
_MOST = 2048  # tokens of a text that are run again
_SLICE = 32  # of them at once: whoever comes meanwhile waits for no more
_WAITING = 16  # texts that may wait to be run again; others are left out
# Caches that might do better
_OTHERS = ("jkvq-int3", "jkvq-int4", "saw-int4", "saw-int4,sink=64,recent=64", "int8")
_RECENT = 8  # texts whose mean is compared with the limit


@dataclass(frozen=True)
class Text:
    """What a request was answered: tokens of the prompt and the answer, and where that begins."""

    tokens: tuple[int, ...]
    answer: int


@dataclass(frozen=True)
class Replayed:
    """What the cache does to an answer.

    kl: of the next token from that of the 16-bit cache, in nats, in the mean of the answer.
    diverged: tokens of the answer before the first that another one would have been likelier than
        with 16 bits; None if there is none.
    """

    kl: float
    diverged: int | None


@dataclass(frozen=True)
class Guarded:
    """What a guard looks at, and with what.

    plain: the model that is served, with a cache of 16 bits.
    others: caches that might do better, by their names, those that take least memory for a whole
        context first.
    share: of the texts that are run again.
    limit: the KL above which it warns, in nats.
    """

    plain: LLM
    others: Mapping[str, LLM]
    share: float
    limit: float


def require_packed(spec: CacheSpec) -> None:
    """Refuses a cache that there is nothing to compare with."""
    if all(side.codec == "float" for side in spec.sides):
        raise UserError(
            f"guard looks at what few bits do to texts, and {spec_text(spec)} has 16 or more: "
            "leave it out, or choose another cache"
        )


def guarded(
    model: Model,
    served: LLM,
    *,
    share: float,
    limit: float,
    calibration: Calibration | str | Path | None = None,
) -> Guarded:
    """A guard of a served model, with the caches that this model may have now.

    Args:
        model: the same without a cache.
        served: with the cache that is served.
        share, limit: see `Guarded`.
        calibration: for those that need one; None takes what is kept for the model, and leaves
            them out where that is nothing.
    """
    require_packed(served.spec)
    run_by = served.implementation
    others: dict[str, LLM] = {}
    for name in _OTHERS:
        known = calibration if methods_for(parse_spec(name)) else None
        with contextlib.suppress(UserError):  # this model cannot have it
            found = with_cache(model, name, known, implementation=run_by)
            others[name] = _sharing(found, [served, *others.values()])
    shape, context = CacheShape.of(model.config), model.config.context
    cheapest = sorted(others, key=lambda name: bits_per_element(others[name].spec, shape, context))
    chosen = {name: others[name] for name in cheapest if others[name].spec != served.spec}
    plain = with_cache(model, PLAIN_CACHE, implementation=run_by)
    return Guarded(plain, chosen, share, limit)


def _sharing(llm: LLM, others: Iterable[LLM]) -> LLM:
    """The same with the weights of another that has equal ones, which are then held once.

    Caches that treat values alike, as jkvq-int2 to jkvq-int4 do, fold the same into them.
    """
    for other in others:
        if other.config == llm.config:
            each = zip(*map(jax.tree.leaves, (llm.params, other.params)), strict=True)
            if all(own is its or jnp.array_equal(own, its) for own, its in each):
                return dataclasses.replace(llm, params=other.params)
    return llm


class Guard:
    """Runs texts again with other caches, a slice at a time.

    All its memory is taken when it is made: make it before the engine takes what is left.
    """

    def __init__(self, served: LLM, how: Guarded, metrics: GuardMetrics):
        self._share, self._limit, self._metrics = how.share, how.limit, metrics
        self._random = random.Random()
        self._most = min(_MOST, served.config.context)
        self._served, self._plain = (_Subject(llm, self._most) for llm in (served, how.plain))
        self._others = {name: _Subject(llm, self._most) for name, llm in how.others.items()}
        self._texts: deque[Text] = deque()
        self._recent: deque[tuple[Text, float]] = deque(maxlen=_RECENT)
        self._going: Iterator[None] | None = None

    def warm_up(self) -> None:
        """Compiles all that it will run."""
        text = Text((0,) * min(2 * _SLICE, self._most), 1)
        for subject in (self._served, *self._others.values()):
            for _ in self._replay(text, subject, []):
                pass

    def take(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Looks at a text that has ended; the share of them is kept for later."""
        if not answer or self._random.random() >= self._share:
            return
        if len(prompt) >= self._most or len(self._texts) >= _WAITING:
            self._metrics.left_out()
            return
        self._texts.append(Text((*prompt, *answer)[: self._most], len(prompt)))

    @property
    def waits(self) -> bool:
        """Whether there is something to do."""
        return self._going is not None or bool(self._texts)

    def work(self) -> None:
        """Does a slice of it."""
        if self._going is None:
            self._going = self._next(self._texts.popleft())
        if next(self._going, self) is self:
            self._going = None

    def _next(self, text: Text) -> Iterator[None]:
        """Runs a text again, and looks for another cache if the latest texts do not hold."""
        found: list[Replayed] = []
        yield from self._replay(text, self._served, found)
        self._metrics.replayed(found[0].kl, found[0].diverged)
        self._recent.append((text, found[0].kl))
        kl = float(np.mean([kl for _, kl in self._recent]))
        if len(self._recent) == _RECENT and not kl <= self._limit:  # NaN does not hold either
            yield from self._warn([text for text, _ in self._recent], kl)
            self._recent.clear()

    def _warn(self, texts: list[Text], kl: float) -> Iterator[None]:
        """Says which cache holds for these texts."""
        better = f"{PLAIN_CACHE} is what it is compared with"
        for name, other in self._others.items():
            found: list[Replayed] = []
            for text in texts:
                yield from self._replay(text, other, found)
            mean = float(np.mean([each.kl for each in found]))
            if mean <= self._limit:
                better = f"{name} has {mean:.2g} on them"
                break
        self._metrics.warned()
        LOG.warning(
            f"the cache does not hold: KL {kl:.2g} in the last {_RECENT} texts that were run "
            f"again, above {self._limit:g}; {better}"
        )

    def _replay(self, text: Text, subject: "_Subject", found: list[Replayed]) -> Iterator[None]:
        """Runs a text with a cache beside the one of 16 bits; adds what it finds in the end."""
        both = (self._plain, subject)
        for each in both:
            each.begin()
        losses: list[float] = []
        other: list[bool] = []
        inputs, targets = text.tokens[:-1], text.tokens[1:]
        for start in range(0, len(inputs), _SLICE):
            now = slice(start, start + _SLICE)
            predicted = []
            for each in both:
                predicted.append(each.step(inputs[now]))
                yield
            scored = range(max(0, text.answer - 1 - start), len(inputs[now]))
            if scored:
                kl, another = _compared(*predicted, _padded(targets[now]))
                losses += np.asarray(kl, np.float64)[0, scored].tolist()
                other += np.asarray(another)[0, scored].tolist()
        found.append(Replayed(float(np.mean(losses)), other.index(True) if any(other) else None))


class _Subject:
    """A model with a cache of its own, in which one text after the other is stored."""

    def __init__(self, llm: LLM, tokens: int):
        self._cached = Cached(llm)
        self._cache: KVCache = self._cached.start(tokens)

    def begin(self) -> None:
        """Forgets the text before: what lies behind the length is never read."""
        sequences = self._cache.sequences
        empty = dataclasses.replace(sequences, length=jnp.zeros_like(sequences.length))
        self._cache = dataclasses.replace(self._cache, sequences=empty)

    def step(self, tokens: Sequence[int]) -> jax.Array:
        """Log-probabilities after each of the next tokens; they are there when it returns."""
        hidden, self._cache = self._cached.step(self._cache, _padded(tokens), len(tokens), 0)
        llm = self._cached.llm
        return log_probabilities(llm.config, llm.params, hidden).block_until_ready()


def _padded(tokens: Sequence[int]) -> np.ndarray:
    padded = np.zeros((1, _SLICE), np.int32)
    padded[0, : len(tokens)] = tokens
    return padded


@jax.jit
def _compared(expected, predicted, targets) -> tuple[jax.Array, jax.Array]:
    """KL of every next token, and whether another one is the most likely."""
    _, kl = token_losses(predicted, targets, expected)
    return kl, expected.argmax(-1) != predicted.argmax(-1)
