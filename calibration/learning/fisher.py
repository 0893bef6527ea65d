"""What an error of a layer's attention costs the next tokens, to second order.

An error e of the outputs of a layer's attention moves the next tokens' distributions by a KL of
about e^T F e / 2. F is the Fisher matrix: the mean of g g^T, where g is the gradient, by the same
outputs, of the logarithm of tokens that are drawn from the model's own distributions. It is taken
as one matrix for all tokens of a layer.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkvq.calibration.learning.passes import (
    ALIKE,
    Network,
    Windows,
    attend,
    first_that_reads_coded,
)
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Hidden, Params, finish, logits, run_layer
from jkvq.support.progress import Bar

_ROWS = 512  # hidden states whose distributions are computed at once

Fisher = Float[Array, "NH NH"]


class Read(NamedTuple):
    """What the attention of a layer was given, and gave, of all tokens of some sequences."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]
    out: Float[Array, "B T N H"]
    sinks: Float[Array, " N"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Exact:
    """Exact attention that hands on what it was given, and whose outputs miss by an error."""

    error: Float[Array, "B T N H"]
    config: ModelConfig = field(metadata={"static": True})

    def __call__(self, q, k, v, state, sinks=None):
        del state
        q, k, v = (heads.finished for heads in (q, k, v))
        how = self.config.attention_scale, self.config.window
        one = functools.partial(attend, None, *how, sinks=sinks)
        out = jax.lax.map(lambda x: one(*x), (q, k, v))
        return out + self.error.astype(out.dtype), Read(q, k, v, out, sinks)


def fishers(network: Network, read: Sequence[Windows], seed: int, bar: Bar) -> list[Fisher]:
    """The Fisher matrix of every layer's attention, of the tokens that read coded ones."""
    config = network.config
    size = config.heads * config.head_dim
    total = [jnp.zeros((size, size))] * config.layers
    tokens = 0
    for number, windows in enumerate(read):
        states, (_, rotary) = list(network.states(windows, None)), network.embed(windows.tokens)
        B, T = windows.tokens.shape
        first = first_that_reads_coded(network.spec, T)
        tokens += B * (T - first)
        key = jax.random.fold_in(jax.random.key(seed), number)
        back = _of_drawn(config, network.ends, states.pop(), key)
        for layer in reversed(range(config.layers)):
            own = config.layer(layer), network.params["layers"][layer]
            back, gradient = _pull(*own, states.pop(), rotary, back)
            total[layer] = _added(total[layer], gradient[:, first:])
            bar.advance(1)
    return [each / tokens for each in total]


@functools.partial(jax.jit, static_argnames="config", compiler_options=ALIKE)
def observed(
    config: ModelConfig, weights: Params, x: Float[Array, "B T D"], rotary
) -> tuple[Float[Array, "B T D"], Read]:
    """Hidden states behind a layer, and what its attention was given."""
    hidden, read = run_layer(
        config, weights, Hidden.of(x), rotary, _Exact(_no_error(config, x), config), None
    )
    return hidden.total, read


@functools.partial(jax.jit, static_argnames="config", compiler_options=ALIKE)
def _pull(config: ModelConfig, weights: Params, x: Float[Array, "B T D"], rotary, back):
    """The gradients of a layer's input and of its attention's outputs, from that of its output."""

    def run(x, error):
        attend = _Exact(error, config)
        return run_layer(config, weights, Hidden.of(x), rotary, attend, None)[0].total

    return jax.vjp(run, x, _no_error(config, x))[1](back)


def _no_error(config: ModelConfig, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
    return jnp.zeros((*x.shape[:2], config.heads, config.head_dim))


@functools.partial(jax.jit, compiler_options=ALIKE)
def _added(total: Fisher, gradient: Float[Array, "B T N H"]) -> Fisher:
    flat = gradient.reshape(-1, total.shape[0]).astype(jnp.float32)
    return total + jnp.matmul(flat.T, flat, precision="highest")


@functools.partial(jax.jit, static_argnames="config", compiler_options=ALIKE)
def _of_drawn(
    config: ModelConfig, ends: Params, x: Float[Array, "B T D"], key
) -> Float[Array, "B T D"]:
    """The gradient, by final states, of the logarithms of a token drawn behind each."""

    def likelihood(hidden: Float[Array, "rows D"], token: Int[Array, " rows"]) -> Float[Array, ""]:
        every = jax.nn.log_softmax(logits(config, ends, hidden))
        return jnp.take_along_axis(every, token[:, None], axis=-1).sum()

    def of_block(block):
        hidden, key = block
        token = jax.random.categorical(key, logits(config, ends, hidden)).astype(jnp.int32)
        return jax.grad(likelihood)(hidden, token)

    last, back = jax.vjp(lambda x: finish(config, ends["norm"], Hidden.of(x)), x)
    flat = last.reshape(-1, last.shape[-1])
    padded = jnp.pad(flat, ((0, -len(flat) % _ROWS), (0, 0))).reshape(-1, _ROWS, flat.shape[-1])
    gradient = jax.lax.map(of_block, (padded, jax.random.split(key, len(padded))))
    return back(gradient.reshape(-1, flat.shape[-1])[: len(flat)].reshape(last.shape))[0]
