"""How well a model predicts text through its cache."""

import functools
import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkvq.basis import Basis
from jkvq.cache import KVCache, empty_cache, pages_for
from jkvq.errors import UserError
from jkvq.llm import LLM
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params, forward, logits
from jkvq.progress import count_bar

_CHUNK = 256  # tokens per step


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood of each token given all before it."""

    ppl: float
    nll: float  # mean, in nats
    scored: int  # tokens: all but the first


def perplexity(llm: LLM, tokens: list[int]) -> Perplexity:
    """Perplexity of ``tokens``, where every token sees all before it and itself as stored."""
    if not 2 <= len(tokens) <= llm.config.context:
        raise UserError(
            f"{len(tokens)} tokens: from 2 to the model's context of {llm.config.context} are "
            "scored at once"
        )
    pages = max(1, pages_for(len(tokens), llm.spec))
    table = jnp.arange(1, pages + 1, dtype=jnp.int32)[None]
    cache = empty_cache(llm.spec, llm.config.cache_shape, pages + 1, table)
    total = 0.0
    with count_bar("Scoring", len(tokens)) as bar:
        for start in range(0, len(tokens), _CHUNK):
            chunk = np.asarray(tokens[start : start + _CHUNK + 1], np.int32)
            count = min(_CHUNK, len(tokens) - start)
            inputs, targets = np.zeros((2, 1, _CHUNK), np.int32)
            inputs[0, :count], targets[0, : len(chunk) - 1] = chunk[:count], chunk[1:]
            cache, losses = _score(
                llm.config, llm.params, llm.basis, cache, inputs, targets, jnp.asarray([count])
            )
            total += float(np.asarray(losses, np.float64)[0, : len(chunk) - 1].sum())
            bar.advance(count)
    nll = total / (len(tokens) - 1)
    if math.isnan(nll):
        raise UserError(
            "the model's scores are not numbers (NaN): its weights are damaged, or the dtype is "
            "too narrow for them"
        )
    return Perplexity(math.exp(min(nll, 700.0)), nll, len(tokens) - 1)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _score(
    config: ModelConfig,
    params: Params,
    basis: Basis,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    count: Int[Array, " B"],
) -> tuple[KVCache, Float[Array, "B T"]]:
    """Negative log-likelihood of each target."""
    hidden, cache = forward(config, params, basis, cache, tokens, count, own="stored")
    scores = logits(config, params, hidden)
    chosen = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return cache, jax.nn.logsumexp(scores, axis=-1) - chosen


def read_text(path: Path) -> str:
    """The text of a file, unpacked if it ends in .gz."""
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text: {error}") from None


def first_tokens(llm: LLM, text: str, count: int) -> list[int]:
    """The first ``count`` tokens of a text, with no leading token added."""
    tokens = list(llm.tokenizer.hf.encode(text, add_special_tokens=False))
    if len(tokens) < count:
        raise UserError(f"{count} tokens were asked for and the text has {len(tokens)}")
    return tokens[:count]
