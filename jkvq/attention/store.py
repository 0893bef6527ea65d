"""Storing a chunk of tokens: into pages, by way of the windows where a spec has them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jkvq.attention.layer_view import LayerView
from jkvq.attention.step_plan import Chunk, GroupPlan, Targets
from jkvq.cache.layout import LayerGroup, Windows
from jkvq.cache.windows import advance, rounded, slot_of, write_window
from jkvq.pallas_kernels.formats.packed import Packed
from jkvq.pallas_kernels.reference.scatter import scatter

Tokens = Float[Array, "B T K H"]
# Puts tokens in the basis of the cache into packed pages of a layer.
WritePages = Callable[[LayerView, Tokens, Tokens, Targets], tuple[Packed, Packed]]


def write_plainly(view: LayerView, k: Tokens, v: Tokens, to: Targets) -> tuple[Packed, Packed]:
    """Encodes tokens and scatters them, by plain JAX; any codec."""
    storage = view.storage
    key, value = (
        scatter(pages, codec.encode(x), view.index, to.page, to.slot)
        for pages, codec, x in zip((storage.key, storage.value), view.codecs, (k, v), strict=True)
    )
    return key, value


def write_if_any(view: LayerView, k: Tokens, v: Tokens, to: Targets) -> tuple[Packed, Packed]:
    """As ``write_plainly``, but encodes nothing if no token is real: windows seldom let one out."""
    kept = view.storage.key, view.storage.value
    return jax.lax.cond(to.real.any(), lambda: write_plainly(view, k, v, to), lambda: kept)


def store_chunk(
    view: LayerView,
    k: Tokens,
    v: Tokens,
    old: tuple[Float[Array, "B R K H"], Float[Array, "B R K H"]] | None,
    chunk: Chunk,
    plan: GroupPlan,
    write: WritePages,
) -> LayerGroup:
    """The storage with a chunk in the pages and windows of a layer, which held ``old`` before.

    Each buffer is written once, with data that depend on what was read of it before: XLA updates it
    in place then, and would copy it otherwise.
    """
    spec, length, windows, to = view.spec, chunk.sequences.length, view.storage.windows, plan.write
    if windows is not None and plan.windows is not None and old is not None:
        table, slot = plan.windows.table, slot_of(spec, plan.windows.leaving.index)[..., None, None]

        def pass_through(window, held, x):
            """The window with x in it, and the tokens that leave it or go past it."""
            advanced = advance(spec, held, x, length, chunk.count)
            # A token is coded as the window holds it, whether it passed through there or not.
            out = [jnp.take_along_axis(held, slot, axis=1), rounded(window, x)]
            return write_window(window, view.index, table, advanced), jnp.concatenate(out, axis=1)

        key_window, k = pass_through(windows.key, old[0], k)
        value_window, v = pass_through(windows.value, old[1], v)
        windows = Windows(key_window, value_window)
        to = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), plan.windows.packed, to)
    return LayerGroup(*write(view, k, v, to), windows)
