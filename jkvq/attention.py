"""Attention of new tokens over the cache and themselves.

What a query sees of the tokens before it is divided by one number, its *boundary*: packed tokens
below it are read from pages; the sink, and packed-to-be tokens from it on, are read exactly, from
the windows or from the chunk itself.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jkvq.basis import Basis
from jkvq.cache import Chunk, KVCache, Stack, Windows, home, page_of
from jkvq.pallas_kernels.chunk_attention import chunk_attention
from jkvq.pallas_kernels.codecs import Codec
from jkvq.pallas_kernels.merge import merge
from jkvq.pallas_kernels.paged_attention import paged_attention
from jkvq.pallas_kernels.write import write
from jkvq.spec import CacheSpec
from jkvq.window import advance, held_positions, read_window, rounded, slot_of, write_window

# How new tokens see each other: "exact" as computed, as prefill does; "stored" as the cache would
# give them back if they came one at a time, as decode does.
Own = Literal["exact", "stored"]


def attend(
    cache: KVCache,
    basis: Basis,
    layer: int,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    chunk: Chunk,
    *,
    scale: float,
    own: Own,
) -> tuple[Float[Array, "B T N H"], KVCache]:
    """Stores k and v of a chunk in one layer, and lets its queries attend.

    Values come, and the output goes, in the basis of the cache (see basis.py). The returned cache
    holds the new tokens; its ``length`` is the caller's to advance, once all layers are through.
    """
    spec, (stack_id, index) = cache.spec.of_layer(layer), home(cache.spec, layer)
    stack = cache.stacks[stack_id]
    key, value = basis.layer(layer)
    dtype = q.dtype
    q, k = key.turn(q, layer), key.enter(k, layer)
    codecs = key.codec(layer), value.codec(layer)

    sees = spec.packed(chunk.position + 1 if own == "stored" else cache.length[:, None])
    boundary = jnp.where(chunk.real, sees, 0)
    parts = []
    old = None
    if stack.windows is not None:
        old_k = read_window(stack.windows.key, index, cache.row)
        old_v = read_window(stack.windows.value, index, cache.row)
        old = (old_k, old_v)
        seen = _seen(spec, held_positions(spec, cache.length), boundary)
        parts.append(chunk_attention(q, old_k, old_v, seen & chunk.real[..., None], scale=scale))
    if spec.windowed or own == "exact":
        causal = chunk.position[:, None, :] <= chunk.position[..., None]
        seen = _seen(spec, chunk.position, boundary) & causal & chunk.real[:, None]
        parts.append(chunk_attention(q, k, v, seen, scale=scale))
    stack = _store(cache, spec, stack, index, codecs, k, v, old, chunk)
    parts.append(
        paged_attention(
            q, stack.key, stack.value, *codecs, index, cache.block_table, boundary, scale=scale
        )
    )
    out, lse = parts[0]
    for part in parts[1:]:
        out, lse = merge(out, lse, *part)
    stacks = list(cache.stacks)
    stacks[stack_id] = stack
    return out.astype(dtype), dataclasses.replace(cache, stacks=tuple(stacks))


def _seen(spec: CacheSpec, position, boundary):
    """Which exact tokens [B, S] by position each query [B, T] with a boundary reads exactly."""
    position = position[:, None]  # [B, 1, S]
    kept = (position < spec.sink) | (position - spec.sink >= boundary[..., None])
    return (position >= 0) & kept


def _store(
    cache: KVCache,
    spec: CacheSpec,
    stack: Stack,
    index: int,
    codecs: tuple[Codec, Codec],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    old: tuple[Float[Array, "B W K H"], Float[Array, "B W K H"]] | None,
    chunk: Chunk,
) -> Stack:
    """The stack with a chunk in the pages and windows of a layer, which held ``old`` before.

    Each buffer is written once, with data that depend on what was read of it before: XLA updates it
    in place then, and would copy it otherwise.
    """
    windows, packed_index, packing = stack.windows, chunk.position - spec.sink, chunk.real
    if windows is not None and old is not None:
        leaving, leaves, after = _leaving(cache, spec, chunk)
        slot = slot_of(spec, leaving)[..., None, None]

        def pass_through(window, held, x):
            """The window with x in it, and the tokens that leave it or go past it."""
            advanced = advance(spec, held, x, cache.length, chunk.count)
            # A token is coded as the window holds it, whether it passed through there or not.
            out = [jnp.take_along_axis(held, slot, axis=1), rounded(window, x)]
            return write_window(window, index, cache.row, advanced), jnp.concatenate(out, axis=1)

        key_window, k = pass_through(windows.key, old[0], k)
        value_window, v = pass_through(windows.value, old[1], v)
        windows = Windows(key_window, value_window)
        passing = chunk.real & (packed_index >= 0) & (packed_index < after)
        packing = jnp.concatenate([leaves, passing], axis=1)
        packed_index = jnp.concatenate([leaving, packed_index], axis=1)
    page, slot = page_of(cache, packed_index, packing)
    key = write(stack.key, codecs[0].encode(k), index, page, slot)
    value = write(stack.value, codecs[1].encode(v), index, page, slot)
    return Stack(key, value, windows)


def _leaving(cache: KVCache, spec: CacheSpec, chunk: Chunk):
    """The ring's tokens that a chunk may drive out, which of them it does, and the new boundary."""
    before = spec.packed(cache.length)[:, None]
    after = spec.packed(cache.length + chunk.count)[:, None]
    T = chunk.position.shape[1]
    most = min(spec.recent + spec.page, -(-T // spec.page) * spec.page)
    leaving = before + jnp.arange(most, dtype=jnp.int32)[None]
    return leaving, (leaving < after) & (leaving < cache.length[:, None] - spec.sink), after
