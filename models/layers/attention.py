"""Grouped-query attention, over whatever keeps its keys and values."""

import dataclasses
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jkvq.models.config import ModelConfig
from jkvq.models.layers.linear import Linear, RMSNorm, weight_of
from jkvq.pallas_kernels.types import HeadNorm, NewHeads

Rotary = tuple[Float[Array, "B T H/2"], Float[Array, "B T H/2"]]  # cos, sin


class Attend(Protocol):
    """What a layer does with its queries, keys and values, which are to be finished.

    A pytree, so that a compiled layer takes it as an argument: layers whose ``Attend`` differ in
    arrays alone share a program.
    """

    def __call__(
        self,
        q: NewHeads,
        k: NewHeads,
        v: NewHeads,
        state: Any,
        sinks: Float[Array, " N"] | None = None,
        /,
    ) -> tuple[Float[Array, "B T N C"], Any]:
        """The attention's output and the state after this layer.

        Where queries have more channels than keys, the rest of them meets values.
        ``sinks``: a logit of each query head beside those of the tokens; None is none.
        """
        ...


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, over whatever ``attend`` keeps."""

    def __init__(self, config: ModelConfig):
        self.config = config
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.qkv = Linear(config.width, queries + 2 * keys, bias=config.qk_bias or config.v_bias)
        self.o = Linear(queries, config.width, bias=config.out_bias)
        sizes = (queries, keys) if config.qk_norm_whole else (config.head_dim,) * 2
        self.q_norm, self.k_norm = (
            RMSNorm(size, config.norm_eps, of_one=config.norm_of_one) if config.qk_norm else None
            for size in sizes
        )
        self.sinks = weight_of(config.heads) if config.sinks else None

    def __call__(self, x, rotary: tuple[Rotary, ...], attend: Attend, state):
        (B, T, _), N, K = x.shape, self.config.heads, self.config.kv_heads
        joined = self.qkv.unsummed(x).in_heads(self.config.head_dim)
        cos, sin = rotary[self.config.rotary]
        q = NewHeads(joined, 0, N, None, amplified(self.config, cos, sin))
        k = NewHeads(joined, N, K, None, (cos, sin))
        v = NewHeads(joined, N + K, K)
        q, k = self._to_norm(q, self.q_norm), self._to_norm(k, self.k_norm)
        sinks = () if self.sinks is None else (self.sinks[...],)
        out, state = attend(q, k, v, state, *sinks)
        return self.o.unsummed(out.reshape(B, T, -1)), state

    def _to_norm(self, heads: NewHeads, norm: RMSNorm | None) -> NewHeads:
        """Heads to be normed, each by itself; a norm of all together is taken here."""
        if norm is None:
            return heads
        if not self.config.qk_norm_whole:
            by = HeadNorm(norm.weight[...], norm.eps, norm.of_one)
            return dataclasses.replace(heads, norm=by)
        x = dataclasses.replace(heads, rotary=None).finished
        normed = norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)
        return dataclasses.replace(NewHeads.of(normed), rotary=heads.rotary)


def amplified(config: ModelConfig, cos, sin) -> Rotary:
    """The rotation of queries, with the gain of queries and keys in it: scores are the same."""
    gain, turning = config.rope_gain, len(config.rope_divisors)
    if gain == 1.0:
        return cos, sin
    each = np.where(np.arange(cos.shape[-1]) < turning, gain**2, 1.0).astype(np.float32)
    each = jnp.expand_dims(each, range(cos.ndim - 1))
    return cos * each, sin * each
