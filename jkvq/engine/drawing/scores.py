"""Log probabilities under the model's own distribution: of tokens, and of the likeliest ones."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkvq.engine.sampling import MOST_TOPS
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params, logits

_BLOCK = 128  # places of prompts whose scores are in memory at once


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tops:
    """The likeliest tokens at some places, the likeliest first."""

    tokens: Int[Array, "*places K"]
    logprobs: Float[Array, "*places K"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scored:
    """What the model makes of prompts: of the token that follows at each place, and of others."""

    logprobs: Float[Array, "R T"]
    tops: Tops


def logprob_of(scores: Float[Array, "B V"], token: Int[Array, " B"]) -> Float[Array, " B"]:
    """The log probability of a token."""
    chosen = jnp.take_along_axis(scores, token[:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(scores, axis=-1)


def tops_of(scores: Float[Array, "B V"]) -> Tops:
    """The likeliest tokens."""
    best, tokens = jax.lax.top_k(scores, min(MOST_TOPS, scores.shape[-1]))
    return Tops(tokens, best - jax.nn.logsumexp(scores, axis=-1, keepdims=True))


@functools.partial(jax.jit, static_argnames="config")
def score(
    config: ModelConfig,
    params: Params,
    hidden: Float[Array, "R T D"],
    following: Int[Array, "R T"],
) -> Scored:
    """Scores the token that follows at each place of a chunk of prompts."""
    rows, width, size = hidden.shape
    block = min(_BLOCK, width)  # widths are powers of two

    def of_block(block):
        states, tokens = block
        scores = logits(config, params, states)
        return logprob_of(scores, tokens), tops_of(scores)

    blocks = hidden.reshape(-1, block, size), following.reshape(-1, block)
    found = Scored(*jax.lax.map(of_block, blocks))
    return jax.tree.map(lambda x: x.reshape(rows, width, *x.shape[2:]), found)
