"""Attention of new tokens over the cache and themselves."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jkvq.cache import KVCache, Placement
from jkvq.pallas_kernels.chunk_attention import chunk_attention
from jkvq.pallas_kernels.merge import merge
from jkvq.pallas_kernels.paged_attention import paged_attention
from jkvq.pallas_kernels.write import write

# How new tokens see each other: "exact" as computed, as prefill does; "stored" as the cache gives
# them back, as decode does.
Own = Literal["exact", "stored"]


def attend(
    cache: KVCache,
    layer: int,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    at: Placement,
    *,
    scale: float,
    own: Own,
) -> tuple[Float[Array, "B T N H"], KVCache]:
    """Stores k and v of T new tokens per sequence in one layer, and lets their queries attend.

    Earlier tokens are always seen through the cache. The returned cache holds the new tokens;
    its ``length`` is the caller's to advance, once all layers are through.
    """
    keys, values = write(cache.keys, cache.values, k, v, layer, at.page, at.slot)
    real = jnp.arange(q.shape[1])[None] < at.count[:, None]
    if own == "stored":
        length = jnp.where(real, at.position + 1, 0)
        out, _ = paged_attention(q, keys, values, layer, cache.block_table, length, scale=scale)
    else:
        length = jnp.where(real, cache.length[:, None], 0)
        prefix = paged_attention(q, keys, values, layer, cache.block_table, length, scale=scale)
        out, _ = merge(*prefix, *chunk_attention(q, k, v, at.count, scale=scale))
    return out.astype(q.dtype), dataclasses.replace(cache, keys=keys, values=values)
