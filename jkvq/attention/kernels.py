"""Attention through the GPU kernels: a chunk of a prompt, or one new token of each sequence."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from jkvq.attention.layer_view import LayerCache
from jkvq.attention.page_means import mean_scores
from jkvq.attention.store import store_chunk, write_plainly
from jkvq.cache.layout import Chunk, KVCache, Stack, Windows, page_of
from jkvq.cache.windows import held_positions, leaving, seen_exactly, slot_of, window_table
from jkvq.pallas_kernels.formats.codecs import FloatCodec
from jkvq.pallas_kernels.formats.packed import Packed
from jkvq.pallas_kernels.prefill import exact_attention, prefix_attention, self_attention
from jkvq.pallas_kernels.reference.merge import merge_all
from jkvq.pallas_kernels.settings import decode_config, write_config
from jkvq.pallas_kernels.triton.decode import decode, merge_partials, plan_decode
from jkvq.pallas_kernels.triton.write import Held, Side, writable, write

_EXACT = FloatCodec(jnp.float16)  # of the windows


def attend_prefill(
    view: LayerCache, q, k, v, chunk: Chunk, *, scale: float, interpret: bool
) -> tuple[Float[Array, "B T N H"], KVCache]:
    """A chunk sees itself exactly and earlier ones as they are stored."""
    spec, length, key = view.spec, view.cache.length, view.key
    # cuDNN takes 16 bits: for a model in float32 that would be a loss.
    fused = "cudnn" if q.dtype == jnp.bfloat16 and not interpret else "xla"
    parts = [self_attention(q, k, v, scale=scale, fused=fused)]
    turned, old = key.turn(q, view.layer), view.exact_tokens()
    boundary, mean = spec.packed(length), None
    if old is not None:
        held, position = old[0], view.exact_positions()
        if key.mean is not None:
            held = held + key.entered_mean(view.layer, spec.middle(position))
        seen = seen_exactly(spec, position, boundary[:, None])[:, 0]
        parts.append(exact_attention(turned, held, old[1], seen, scale=scale, fused=fused))
    writes = functools.partial(_write_pages, interpret=interpret)
    entered = key.enter(k, view.layer, spec.middle(chunk.position))
    stack = store_chunk(view, entered, v, old, chunk, writes)
    if key.mean is not None:
        number = jnp.arange(view.cache.block_table.shape[1])
        mean = key.entered_mean(view.layer, spec.page_middle(number)[None])[0]
    pages = stack.key, stack.value, *view.codecs, view.index, view.cache.block_table
    parts.append(prefix_attention(turned, *pages, boundary, mean, scale=scale, fused=fused))
    return merge_all(parts)[0], view.with_stack(stack)


def _write_pages(view: LayerCache, k, v, page, slot, real, *, interpret: bool):
    """Tokens in the basis of the cache, by the kernel if it takes their codecs."""
    if not all(map(writable, view.codecs)):
        return write_plainly(view, k, v, page, slot, real)
    stack, (key, value) = view.stack, view.codecs
    return write(
        Side(stack.key, k, key),
        Side(stack.value, v, value),
        view.index,
        page,
        slot,
        real=real,
        config=write_config(page.size),
        interpret=interpret,
    )[:2]


def attend_token(
    view: LayerCache, q, k, v, chunk: Chunk, *, scale: float, interpret: bool
) -> tuple[Float[Array, "B 1 N H"], KVCache]:
    """A new token of each sequence is stored, and sees itself and all others as they are stored."""
    spec, (key, value) = view.spec, view.codecs
    K, p = view.stack.key.kv_heads, spec.page
    shifts = mean_scores(view, q)
    store = _store_by_windows if spec.windowed else _store_in_pages
    stack, q = store(view, q, k, v, chunk, interpret=interpret)
    boundary = jnp.where(chunk.real, spec.packed(chunk.position + 1), 0)
    config = decode_config(key)
    plan = plan_decode(boundary[:, 0], page=p, kv_heads=K, config=config)
    pages = stack.key, stack.value, key, value, view.index, view.cache.block_table
    run = functools.partial(decode, q[:, 0], scale=scale, interpret=interpret)
    shift = None if shifts is None else shifts.shift()
    parts = [run(*pages, plan, shift, config=config)]
    if stack.windows is not None:
        length = view.cache.length + chunk.count
        held = held_positions(spec, length)
        seen = seen_exactly(spec, held, boundary)[:, 0] & chunk.real
        used = jnp.minimum(length, spec.sink + spec.recent + spec.page)  # slots fill in order
        config = decode_config(_EXACT)
        plan = plan_decode(used, page=p, kv_heads=K, config=config, seen=seen)
        windows = Packed(stack.windows.key), Packed(stack.windows.value), _EXACT, _EXACT
        table = window_table(spec, view.cache.row)
        shift = None if shifts is None else shifts.shift(held)
        parts.append(run(*windows, view.index, table, plan, shift, config=config))
    out, _ = merge_partials(parts, q.shape[2], interpret=interpret)
    return out[:, None], view.with_stack(stack)


def _store_in_pages(view: LayerCache, q, k, v, chunk: Chunk, *, interpret: bool):
    """The stack with the new tokens in their pages, and the queries turned."""
    page, slot = page_of(view.cache, chunk.position, chunk.real)
    middle = view.spec.middle(chunk.position)
    turn = view.key.of_layer(view.layer, middle)
    if not all(map(writable, view.codecs)):
        k, q = view.key.enter(k, view.layer, middle), view.key.turn(q, view.layer)
        return Stack(*write_plainly(view, k, v, page, slot, chunk.real), None), q
    stack, (key, value) = view.stack, view.codecs
    key, value, turned = write(
        Side(stack.key, k, key, turn.towards(key)),
        Side(stack.value, v, value),
        view.index,
        page,
        slot,
        queries=q if turn.rotation is not None else None,
        config=write_config(page.size),
        interpret=interpret,
    )
    return Stack(key, value, None), q if turned is None else turned


def _store_by_windows(view: LayerCache, q, k, v, chunk: Chunk, *, interpret: bool):
    """The stack with the new tokens in their windows and what they drive out in pages; q turned."""
    spec, cache, windows = view.spec, view.cache, view.stack.windows
    assert windows is not None
    table = window_table(spec, cache.row)

    def place(slot):
        return jnp.take_along_axis(table, slot // spec.page, axis=1), slot % spec.page

    at = chunk.position
    slot = jnp.where(at < spec.sink, at, slot_of(spec, at - spec.sink))
    turn = view.key.of_layer(view.layer, spec.middle(at))
    key, value, turned = write(
        Side(Packed(windows.key), k, _EXACT, turn.towards(_EXACT)),
        Side(Packed(windows.value), v, _EXACT),
        view.index,
        *place(slot),
        queries=q if turn.rotation is not None else None,
        config=write_config(slot.size),
        interpret=interpret,
    )
    windows = Windows(key.codes, value.codes)
    driven_out = leaving(spec, cache.length, chunk.count, 1)
    page, slot = page_of(cache, driven_out.index, driven_out.leaves)
    held = place(slot_of(spec, driven_out.index))
    stack, codecs = view.stack, view.codecs
    if all(map(writable, codecs)):
        key, value, _ = write(
            Side(stack.key, Held(windows.key, *held), codecs[0]),
            Side(stack.value, Held(windows.value, *held), codecs[1]),
            view.index,
            page,
            slot,
            real=driven_out.leaves,
            config=write_config(page.size),
            interpret=interpret,
        )
    else:
        k, v = (
            _EXACT.decode(
                Packed(window.at[view.index, held[0], :, held[1]].get(mode="promise_in_bounds")),
                driven_out.leaves,
            )
            for window in (windows.key, windows.value)
        )
        key, value = write_plainly(view, k, v, page, slot, driven_out.leaves)
    return Stack(key, value, windows), q if turned is None else turned
