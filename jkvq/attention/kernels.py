"""Attention through the GPU kernels: a chunk of a prompt, or one new token of each sequence."""

import dataclasses
import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from jkvq.attention.layer_view import LayerView
from jkvq.attention.step_plan import Chunk, GroupPlan, PackPlan, Targets
from jkvq.attention.store import pack_plainly, store_chunk, write_plainly
from jkvq.cache.basis import Angles
from jkvq.cache.layout import ExactPages, LayerGroup
from jkvq.pallas_kernels.decode import decode
from jkvq.pallas_kernels.prefill import ExactTokens, prefix_attention, self_attention
from jkvq.pallas_kernels.reference.merge import merge_all
from jkvq.pallas_kernels.settings import write_settings
from jkvq.pallas_kernels.triton.decode import merge_partials
from jkvq.pallas_kernels.triton.write import writable, write
from jkvq.pallas_kernels.types import InPages, NewHeads, WriteSide
from jkvq.pallas_kernels.work import Span, one_each


def attend_prefill(
    view: LayerView, q, k, v, chunk: Chunk, plan: GroupPlan, *, scale: float, interpret: bool
) -> tuple[Float[Array, "B T N H"], LayerGroup]:
    """A chunk sees itself exactly and earlier ones as they are stored."""
    spec, key = view.spec, view.key
    # cuDNN takes 16 bits: for a model in float32 that would be a loss.
    fused = "cudnn" if q.dtype != jnp.float32 and not interpret else "xla"
    factors = jnp.float32 if q.dtype == jnp.float32 else jnp.float16  # as `write` has it
    parts = [self_attention(q, k, v, scale=scale, fused=fused)]
    old, boundary, mean = view.exact_tokens(plan), spec.packed(chunk.sequences.length), None
    writes = functools.partial(_write_pages, interpret=interpret)
    entered = key.enter(k, view.layer, plan.token_angles, factors)
    storage = store_chunk(view, entered, v, old, plan, writes)
    if plan.page_angles is not None:
        packed = Angles(*(x[None, spec.sink_pages :] for x in plan.page_angles))
        mean = key.entered_mean(view.layer, packed)[0]
    pages = storage.key, storage.value, *view.codecs, view.index, plan.table
    exact = _exact_tokens(view, old, plan)
    rotated = key.rotate_queries(q, view.layer, factors)
    parts.append(prefix_attention(rotated, *pages, boundary, mean, exact, scale=scale, fused=fused))
    return merge_all([*parts, *view.sink_parts(q)])[0], storage


def _exact_tokens(view: LayerView, old, plan: GroupPlan) -> ExactTokens | None:
    """The tokens that stood in windows before the chunk, with their means."""
    if old is None or plan.exact is None:
        return None
    k, v = old
    if plan.exact.angles is not None:
        k = k + view.key.entered_mean(view.layer, plan.exact.angles)
    return ExactTokens(k, v, plan.exact.count)


def _write_pages(view: LayerView, k, v, to: Targets, *, interpret: bool):
    """Tokens in the basis of the cache, or in pages; by the kernel if it takes their codecs."""
    if not all(map(writable, view.codecs)):
        return write_plainly(view, k, v, to)
    storage, (key, value) = view.storage, view.codecs
    k, v = (x if isinstance(x, InPages) else NewHeads.of(x) for x in (k, v))
    return write(
        WriteSide(storage.key, k, key),
        WriteSide(storage.value, v, value),
        view.index,
        to.page,
        to.slot,
        real=to.real,
        settings=write_settings(to.page.size),
        interpret=interpret,
    )[:2]


def attend_token(
    view: LayerView,
    q: NewHeads,
    k: NewHeads,
    v: NewHeads,
    chunk: Chunk,
    plan: GroupPlan,
    *,
    scale: float,
    interpret: bool,
) -> tuple[Float[Array, "B 1 N H"], LayerGroup]:
    """A new token of each sequence is stored, and sees itself and all others as they are stored."""
    reads = plan.reads
    assert reads is not None and chunk.position.shape[1] == 1
    if plan.pack is not None:
        packed = pack_layer(view, plan.pack, interpret=interpret)
        view = dataclasses.replace(view, storage=packed)
    store = _store_in_pages if plan.exact is None else _store_exactly
    storage, queries = store(view, q, k, v, plan, interpret=interpret)
    means = view.page_means(queries, plan)
    shift = None if means is None else means.shift()
    spans = [Span(storage.key, storage.value, view.codecs, plan.table, reads.packed, shift)]
    if plan.exact is not None:
        assert storage.exact is not None and reads.exact is not None
        exact = storage.exact.key, storage.exact.value, view.window_codecs
        shift = None if means is None else means.shift(reads.number)
        spans.append(Span(*exact, plan.exact.table, reads.exact, shift))
    parts = decode(queries.rotated[:, 0], spans, view.index, scale=scale, interpret=interpret)
    parts += [one_each(*part) for part in view.sink_parts(queries.rotated[:, 0])]
    out, _ = merge_partials(parts, q.count, v.joined.dtype, interpret=interpret)
    return out[:, None], storage


def _store_in_pages(view: LayerView, q, k, v, plan: GroupPlan, *, interpret: bool):
    """The storage with the new tokens in their pages, and the queries."""
    storage, (key, value), to = view.storage, view.codecs, plan.write
    assert to is not None
    if not (writable(key) and writable(value)):
        entered = view.key.enter(k.finished, view.layer, plan.token_angles)
        written = write_plainly(view, entered, v.finished, to)
        return LayerGroup(*written, None), view.queries(q.finished)
    transform = view.key.transform(view.layer, plan.wide_angles)
    new_key, new_value, queries = write(
        WriteSide(storage.key, k, key, transform),
        WriteSide(storage.value, v, value),
        view.index,
        to.page,
        to.slot,
        queries=q,
        settings=write_settings(to.page.size),
        interpret=interpret,
    )
    assert queries is not None
    return LayerGroup(new_key, new_value, None), queries


def _store_exactly(view: LayerView, q, k, v, plan: GroupPlan, *, interpret: bool):
    """The storage with the new tokens in windows, and the queries."""
    storage, exact, (key, value) = view.storage, view.storage.exact, view.window_codecs
    assert exact is not None and plan.exact is not None
    to, transform = plan.exact.new, view.key.transform(view.layer, plan.wide_angles)
    new_key, new_value, queries = write(
        WriteSide(exact.key, k, key, transform),
        WriteSide(exact.value, v, value),
        view.index,
        to.page,
        to.slot,
        queries=q,
        settings=write_settings(to.page.size),
        interpret=interpret,
    )
    assert queries is not None
    return dataclasses.replace(storage, exact=ExactPages(new_key, new_value)), queries


def pack_layer(view: LayerView, plan: PackPlan, *, interpret: bool) -> LayerGroup:
    """The storage with what is due in packed pages."""
    exact, source = view.storage.exact, plan.source
    assert exact is not None
    if not all(map(writable, view.codecs)):
        return pack_plainly(view, plan)
    k, v = (
        InPages(pages, codec, source.page, source.slot)
        for pages, codec in zip((exact.key, exact.value), view.window_codecs, strict=True)
    )
    key, value = _write_pages(view, k, v, plan.to, interpret=interpret)
    return LayerGroup(key, value, exact)
