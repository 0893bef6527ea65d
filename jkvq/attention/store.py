"""Storing a chunk of tokens: into pages, by way of the windows where a spec has them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkvq.attention.layer_view import LayerCache
from jkvq.cache.layout import Chunk, Stack, Windows, page_of
from jkvq.cache.windows import advance, leaving, rounded, slot_of, window_table, write_window
from jkvq.pallas_kernels.formats.packed import Packed
from jkvq.pallas_kernels.triton.write import scatter

Tokens = Float[Array, "B T K H"]
# Puts tokens in the basis of the cache into (page, slot) of a layer; some are not real.
WritePages = Callable[
    [LayerCache, Tokens, Tokens, Int[Array, "B T"], Int[Array, "B T"], Bool[Array, "B T"]],
    tuple[Packed, Packed],
]


def write_plainly(view: LayerCache, k, v, page, slot, real) -> tuple[Packed, Packed]:
    """Encodes tokens and scatters them, by plain JAX; any codec."""
    stack = view.stack
    key, value = (
        scatter(pages, codec.encode(x), view.index, page, slot)
        for pages, codec, x in zip((stack.key, stack.value), view.codecs, (k, v), strict=True)
    )
    return key, value


def write_if_any(view: LayerCache, k, v, page, slot, real) -> tuple[Packed, Packed]:
    """As ``write_plainly``, but encodes nothing if no token is real: windows seldom let one out."""
    kept = view.stack.key, view.stack.value
    return jax.lax.cond(
        real.any(), lambda: write_plainly(view, k, v, page, slot, real), lambda: kept
    )


def store_chunk(
    view: LayerCache,
    k: Tokens,
    v: Tokens,
    old: tuple[Float[Array, "B R K H"], Float[Array, "B R K H"]] | None,
    chunk: Chunk,
    write: WritePages,
) -> Stack:
    """The stack with a chunk in the pages and windows of a layer, which held ``old`` before.

    Each buffer is written once, with data that depend on what was read of it before: XLA updates it
    in place then, and would copy it otherwise.
    """
    spec, cache, windows = view.spec, view.cache, view.stack.windows
    index, packing = chunk.position - spec.sink, chunk.real
    if windows is not None and old is not None:
        driven_out = leaving(spec, cache.length, chunk.count, chunk.position.shape[1])
        slot = slot_of(spec, driven_out.index)[..., None, None]
        table = window_table(spec, cache.row)

        def pass_through(window, held, x):
            """The window with x in it, and the tokens that leave it or go past it."""
            advanced = advance(spec, held, x, cache.length, chunk.count)
            # A token is coded as the window holds it, whether it passed through there or not.
            out = [jnp.take_along_axis(held, slot, axis=1), rounded(window, x)]
            return write_window(window, view.index, table, advanced), jnp.concatenate(out, axis=1)

        key_window, k = pass_through(windows.key, old[0], k)
        value_window, v = pass_through(windows.value, old[1], v)
        windows = Windows(key_window, value_window)
        passing = chunk.real & (index >= 0) & (index < driven_out.after)
        packing = jnp.concatenate([driven_out.leaves, passing], axis=1)
        index = jnp.concatenate([driven_out.index, index], axis=1)
    page, slot = page_of(cache, index, packing)
    return Stack(*write(view, k, v, page, slot, packing), windows)
