"""Attention over the cache in plain JAX and float32: any cache, any phase, any device."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jkvq.attention.layer_view import LayerView
from jkvq.attention.step_plan import Chunk, GroupPlan, Phase
from jkvq.attention.store import store_chunk, write_if_any, write_plainly
from jkvq.cache.layout import LayerGroup
from jkvq.cache.windows import seen_exactly
from jkvq.pallas_kernels.reference.chunk_attention import chunk_attention
from jkvq.pallas_kernels.reference.merge import merge_all
from jkvq.pallas_kernels.reference.paged_attention import paged_attention


def attend_plainly(
    view: LayerView, q, k, v, chunk: Chunk, plan: GroupPlan, *, scale: float, phase: Phase
) -> tuple[Float[Array, "B T N H"], LayerGroup]:
    """Stores a chunk in one layer, and lets its queries attend."""
    spec = view.spec
    means = view.mean_scores(q, chunk, plan)
    q = view.key.rotate_queries(q, view.layer)
    k = view.key.enter(k, view.layer, plan.token_angles)
    parts, old = [], view.window_tokens(plan)
    if spec.windowed or phase == "prefill":
        position = jnp.where(chunk.real, chunk.position, -1)
        keys, values = (x.astype(jnp.float32) for x in (k, v))
        if old is not None and plan.windows is not None:
            position = jnp.concatenate([plan.windows.position, position], axis=1)
            keys, values = (
                jnp.concatenate(both, axis=1) for both in zip(old, (keys, values), strict=True)
            )
        causal = position[:, None] <= chunk.position[..., None]
        seen = seen_exactly(spec, position, plan.boundary) & causal
        shift = None if means is None else means.of_tokens(position)
        parts.append(chunk_attention(q, keys, values, seen, shift, scale=scale))
    writes = write_if_any if spec.windowed else write_plainly
    storage = store_chunk(view, k, v, old, chunk, plan, writes)
    pages = storage.key, storage.value, *view.codecs, view.index, chunk.sequences.block_table
    shift = None if means is None else means.of_pages
    parts.append(paged_attention(q, *pages, plan.boundary, shift, scale=scale))
    return merge_all(parts)[0], storage
