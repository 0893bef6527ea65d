"""Attention of new tokens over the cache and themselves.

What a query sees of the tokens before it is divided by one number, its *boundary*: packed tokens
below it are read from pages; the sink, and packed-to-be tokens from it on, are read exactly, from
the windows or from the chunk itself.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jkvq.attention.kernels import attend_prefill, attend_token
from jkvq.attention.layer_view import LayerCache
from jkvq.attention.page_means import mean_scores
from jkvq.attention.store import store_chunk, write_if_any, write_plainly
from jkvq.cache.layout import Chunk, KVCache
from jkvq.cache.windows import seen_exactly
from jkvq.pallas_kernels.reference.chunk_attention import chunk_attention
from jkvq.pallas_kernels.reference.merge import merge_all
from jkvq.pallas_kernels.reference.paged_attention import paged_attention
from jkvq.pallas_kernels.settings import Implementation

# How new tokens see each other: "exact" as computed, as prefill does; "stored" as the cache would
# give them back if they came one at a time, as decode does.
Own = Literal["exact", "stored"]


# Compiled by itself so that it is traced once, and not for every layer.
@functools.partial(jax.jit, static_argnames=("scale", "own", "implementation"))
def attend(
    view: LayerCache,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    chunk: Chunk,
    *,
    scale: float,
    own: Own,
    implementation: Implementation = "reference",
) -> tuple[Float[Array, "B T N H"], KVCache]:
    """Stores k and v of a chunk in one layer, and lets its queries attend.

    Values come, and the output goes, in the basis of the cache (see basis.py). The returned cache
    holds the new tokens; its ``length`` is the caller's to advance, once all layers are through.
    """
    if implementation != "reference" and own == "stored" and q.shape[1] > 1:
        raise ValueError("tokens see each other as stored in the reference implementation only")
    if implementation == "reference":
        out, cache = _attend_reference(view, q, k, v, chunk, scale=scale, own=own)
    else:
        attend_new = attend_token if own == "stored" else attend_prefill
        interpret = implementation == "interpret"
        out, cache = attend_new(view, q, k, v, chunk, scale=scale, interpret=interpret)
    return out.astype(q.dtype), cache


def _attend_reference(view: LayerCache, q, k, v, chunk: Chunk, *, scale: float, own: Own):
    spec, length = view.spec, view.cache.length
    shifts = mean_scores(view, q)
    q = view.key.turn(q, view.layer)
    k = view.key.enter(k, view.layer, spec.middle(chunk.position))
    sees = spec.packed(chunk.position + 1 if own == "stored" else length[:, None])
    boundary = jnp.where(chunk.real, sees, 0)
    parts, old = [], view.exact_tokens()
    if spec.windowed or own == "exact":
        position = jnp.where(chunk.real, chunk.position, -1)
        keys, values = (x.astype(jnp.float32) for x in (k, v))
        if old is not None:
            position = jnp.concatenate([view.exact_positions(), position], axis=1)
            keys, values = (
                jnp.concatenate(both, axis=1) for both in zip(old, (keys, values), strict=True)
            )
        causal = position[:, None] <= chunk.position[..., None]
        seen = seen_exactly(spec, position, boundary) & causal
        shift = None if shifts is None else shifts.of_tokens(position)
        parts.append(chunk_attention(q, keys, values, seen, shift, scale=scale))
    writes = write_if_any if spec.windowed else write_plainly
    stack = store_chunk(view, k, v, old, chunk, writes)
    pages = stack.key, stack.value, *view.codecs, view.index, view.cache.block_table
    shift = None if shifts is None else shifts.of_pages
    parts.append(paged_attention(q, *pages, boundary, shift, scale=scale))
    return merge_all(parts)[0], view.with_stack(stack)
