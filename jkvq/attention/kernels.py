"""Attention through the GPU kernels: a chunk of a prompt, or one new token of each sequence."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from jkvq.attention.layer_view import LayerView
from jkvq.attention.page_means import packed_pages
from jkvq.attention.step_plan import WINDOW_CODEC, Chunk, GroupPlan, Targets
from jkvq.attention.store import store_chunk, write_plainly
from jkvq.cache.layout import LayerGroup, Windows
from jkvq.pallas_kernels.formats.packed import Packed
from jkvq.pallas_kernels.prefill import ExactTokens, prefix_attention, self_attention
from jkvq.pallas_kernels.reference.merge import merge_all
from jkvq.pallas_kernels.settings import decode_settings, write_settings
from jkvq.pallas_kernels.triton.decode import decode, merge_partials
from jkvq.pallas_kernels.triton.write import writable, write
from jkvq.pallas_kernels.types import InPages, WriteSide


def attend_prefill(
    view: LayerView, q, k, v, chunk: Chunk, plan: GroupPlan, *, scale: float, interpret: bool
) -> tuple[Float[Array, "B T N H"], LayerGroup]:
    """A chunk sees itself exactly and earlier ones as they are stored."""
    spec, key = view.spec, view.key
    # cuDNN takes 16 bits: for a model in float32 that would be a loss.
    fused = "cudnn" if q.dtype != jnp.float32 and not interpret else "xla"
    parts = [self_attention(q, k, v, scale=scale, fused=fused)]
    old, boundary, mean = view.window_tokens(plan), spec.packed(chunk.sequences.length), None
    writes = functools.partial(_write_pages, interpret=interpret)
    entered = key.enter(k, view.layer, plan.token_angles)
    storage = store_chunk(view, entered, v, old, chunk, plan, writes)
    if plan.page_angles is not None:
        at = packed_pages(spec, plan.page_angles, chunk.sequences.block_table.shape[1])
        mean = key.entered_mean(view.layer, at)[0]
    pages = storage.key, storage.value, *view.codecs, view.index, chunk.sequences.block_table
    exact = _in_windows(view, old, plan, chunk.sequences.length - boundary)
    rotated = key.rotate_queries(q, view.layer)
    parts.append(prefix_attention(rotated, *pages, boundary, mean, exact, scale=scale, fused=fused))
    return merge_all(parts)[0], storage


def _in_windows(view: LayerView, old, plan: GroupPlan, count) -> ExactTokens | None:
    """The tokens that stood in the windows before the chunk, the sink's and then the recent."""
    if old is None or plan.windows is None:
        return None
    slot, angles = plan.windows.slot, plan.windows.angles
    k, v = (jnp.take_along_axis(x, slot[..., None, None], axis=1) for x in old)
    if angles is not None:
        k = k + view.key.entered_mean(view.layer, angles)
    return ExactTokens(k, v, count)


def _write_pages(view: LayerView, k, v, to: Targets, *, interpret: bool):
    """Tokens in the basis of the cache, or in pages; by the kernel if it takes their codecs."""
    if not all(map(writable, view.codecs)):
        return write_plainly(view, k, v, to)
    storage, (key, value) = view.storage, view.codecs
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
    view: LayerView, q, k, v, chunk: Chunk, plan: GroupPlan, *, scale: float, interpret: bool
) -> tuple[Float[Array, "B 1 N H"], LayerGroup]:
    """A new token of each sequence is stored, and sees itself and all others as they are stored."""
    (key, value), reads = view.codecs, plan.reads
    assert reads is not None and chunk.position.shape[1] == 1
    means = view.mean_scores(q, chunk, plan)
    store = _store_in_pages if plan.windows is None else _store_by_windows
    storage, q = store(view, q, k, v, plan, interpret=interpret)
    pages = storage.key, storage.value, key, value, view.index, chunk.sequences.block_table
    run = functools.partial(decode, q[:, 0], scale=scale, interpret=interpret)
    shift = None if means is None else means.shift()
    parts = [run(*pages, reads.packed, shift, settings=decode_settings(key))]
    if plan.windows is not None:
        assert storage.windows is not None and reads.window is not None
        windows = Packed(storage.windows.key), Packed(storage.windows.value)
        pages = *windows, WINDOW_CODEC, WINDOW_CODEC, view.index, plan.windows.table
        shift = None if means is None else means.shift(reads.number)
        settings = decode_settings(WINDOW_CODEC)
        parts.append(run(*pages, reads.window, shift, settings=settings))
    out, _ = merge_partials(parts, q.shape[2], interpret=interpret)
    return out[:, None], storage


def _store_in_pages(view: LayerView, q, k, v, plan: GroupPlan, *, interpret: bool):
    """The storage with the new tokens in their pages, and the queries rotated."""
    storage, (key, value), to = view.storage, view.codecs, plan.write
    if not (writable(key) and writable(value)):
        entered = view.key.enter(k, view.layer, plan.token_angles)
        written = write_plainly(view, entered, v, to)
        return LayerGroup(*written, None), view.key.rotate_queries(q, view.layer)
    transform = view.key.transform(view.layer, plan.wide_angles)
    new_key, new_value, rotated = write(
        WriteSide(storage.key, k, key, transform),
        WriteSide(storage.value, v, value),
        view.index,
        to.page,
        to.slot,
        queries=q if transform.rotation is not None else None,
        settings=write_settings(to.page.size),
        interpret=interpret,
    )
    return LayerGroup(new_key, new_value, None), q if rotated is None else rotated


def _store_by_windows(view: LayerView, q, k, v, plan: GroupPlan, *, interpret: bool):
    """The storage with new tokens in their windows and what leaves these in pages; q rotated."""
    windows, codecs, goes = view.storage.windows, view.codecs, plan.windows
    assert windows is not None and goes is not None
    transform = view.key.transform(view.layer, plan.wide_angles)
    key, value, rotated = write(
        WriteSide(Packed(windows.key), k, WINDOW_CODEC, transform),
        WriteSide(Packed(windows.value), v, WINDOW_CODEC),
        view.index,
        goes.new.page,
        goes.new.slot,
        queries=q if transform.rotation is not None else None,
        settings=write_settings(goes.new.page.size),
        interpret=interpret,
    )
    windows = Windows(key.codes, value.codes)
    packed = _pack_leaving(view, windows, codecs, plan, interpret=interpret)
    return LayerGroup(*packed, windows), q if rotated is None else rotated


def _pack_leaving(view: LayerView, windows: Windows, codecs, plan: GroupPlan, *, interpret: bool):
    """The packed pages with the tokens that leave the windows."""
    assert plan.windows is not None
    to, source = plan.windows.packed, plan.windows.source
    if all(map(writable, codecs)):
        k, v = (InPages(x, source.page, source.slot) for x in (windows.key, windows.value))
        return _write_pages(view, k, v, to, interpret=interpret)
    k, v = (
        WINDOW_CODEC.decode(
            Packed(
                window.at[view.index, source.page, :, source.slot].get(mode="promise_in_bounds")
            ),
            to.real,
        )
        for window in (windows.key, windows.value)
    )
    return write_plainly(view, k, v, to)
