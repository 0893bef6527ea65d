"""Attention over the cache in plain JAX and float32: any cache, any phase, any device."""

import dataclasses
import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkvq.attention.layer_view import LayerView
from jkvq.attention.step_plan import Chunk, GroupPlan, Phase, Targets
from jkvq.attention.store import (
    Keys,
    Values,
    WritePages,
    store_chunk,
    write_exact,
    write_if_any,
    write_plainly,
)
from jkvq.cache.exact_pages import rounded, seen_exactly
from jkvq.cache.layout import LayerGroup
from jkvq.pallas_kernels.formats.packed import Packed
from jkvq.pallas_kernels.reference.chunk_attention import chunk_attention
from jkvq.pallas_kernels.reference.merge import merge_all
from jkvq.pallas_kernels.reference.paged_attention import paged_attention


def attend_plainly(
    view: LayerView, q, k, v, chunk: Chunk, plan: GroupPlan, *, scale: float, phase: Phase
) -> tuple[Float[Array, "B T N C"], LayerGroup]:
    """Stores a chunk in one layer, and lets its queries attend."""
    H = k.shape[-1]
    queries = view.queries(q[..., :H])
    means, turned = view.page_means(queries, plan), queries.rotated
    q = turned if q.shape[-1] == H else jnp.concatenate([turned, q[..., H:]], axis=-1)
    k = view.key.enter(k, view.layer, plan.token_angles)
    packed = functools.partial(_packed, view, q, plan, means, scale=scale)
    writes = write_if_any if view.spec.windowed else write_plainly
    over = functools.partial(_chunk, view, q, k, v, chunk, plan, means, phase=phase, scale=scale)
    if phase == "prefill":
        earlier = packed(view.storage)
        storage, parts = over(_after(earlier[0], writes))
    else:
        if view.spec.windowed and phase == "decode":
            storage, parts = _token_by_exact_pages(view, q, k, v, plan, means, scale=scale)
        else:
            storage, parts = over(writes)
        earlier = packed(storage)
    return merge_all([*parts, earlier, *view.sink_parts(q)])[0], storage


def _after(read: Float[Array, "B T N C"], write: WritePages) -> WritePages:
    """Writes when pages have been read: where tokens stand that only a chunk sees, its own may go.

    What goes to the padding page is taken from what was read, so that XLA keeps the order, and
    updates pages in place.
    """

    def write_after(view: LayerView, k: Keys, v: Values, to: Targets) -> tuple[Packed, Packed]:
        real, any_token = to.real[..., None, None], read[:, :1, :1, :1]
        k, v = (jnp.where(real, x, any_token.astype(x.dtype)) for x in (k, v))
        return write(view, k, v, to)

    return write_after


def _packed(view: LayerView, q, plan: GroupPlan, means, storage: LayerGroup, *, scale: float):
    """Attention over packed tokens as they stand in a layer's storage."""
    pages = storage.key, storage.value, *view.codecs, view.index, plan.table
    shift = None if means is None else means.of_packed
    oldest = None if plan.oldest is None else plan.oldest - view.spec.sink
    return paged_attention(q, *pages, plan.boundary, shift, oldest, scale=scale)


def _token_by_exact_pages(view: LayerView, q, k, v, plan: GroupPlan, means, *, scale: float):
    """A new token of each sequence, stored, sees itself and others in pages of windows."""
    assert plan.exact is not None
    storage = dataclasses.replace(view.storage, exact=write_exact(view, k, v, plan.exact.new))
    exact = dataclasses.replace(view, storage=storage).exact_tokens(plan)
    assert exact is not None
    position = plan.exact.position
    shift = None if means is None else means.of_tokens(position)
    seen = _in_window((position >= 0)[:, None], position, plan)
    return storage, [_exactly(q, *exact, seen, shift, scale=scale)]


def _exactly(q, k, v, seen, shift, *, scale: float):
    """Attention over exact tokens; queries with more channels than keys meet values with them."""
    keys = k if q.shape[-1] == k.shape[-1] else jnp.concatenate([k, v], axis=-1)
    return chunk_attention(q, keys, v, seen, shift, scale=scale)


def _in_window(
    seen: Bool[Array, "B T S"], position: Int[Array, "B S"], plan: GroupPlan
) -> Bool[Array, "B T S"]:
    """What each query sees of tokens by their positions, where its layer has a window."""
    return seen if plan.oldest is None else seen & (position[:, None] >= plan.oldest[..., None])


def _chunk(
    view: LayerView,
    q,
    k,
    v,
    chunk: Chunk,
    plan: GroupPlan,
    means,
    writes: WritePages,
    *,
    phase: Phase,
    scale: float,
):
    """A chunk, stored, sees itself and what is in pages of windows."""
    spec, parts, old = view.spec, [], view.exact_tokens(plan)
    if spec.windowed or phase == "prefill":
        position = jnp.where(chunk.real, chunk.position, -1)
        keys, values = (x.astype(jnp.float32) for x in (k, v))
        if phase == "forced":  # each sees itself and others as they are stored
            both = zip(view.window_codecs, (keys, values), strict=True)
            keys, values = (rounded(codec, x) for codec, x in both)
        if old is not None and plan.exact is not None:
            position = jnp.concatenate([plan.exact.position, position], axis=1)
            keys, values = (
                jnp.concatenate(both, axis=1) for both in zip(old, (keys, values), strict=True)
            )
        causal = position[:, None] <= chunk.position[..., None]
        seen = _in_window(seen_exactly(spec, position, plan.boundary) & causal, position, plan)
        shift = None if means is None else means.of_tokens(position)
        parts.append(_exactly(q, keys, values, seen, shift, scale=scale))
    return store_chunk(view, k, v, old, plan, writes), parts
