"""Storing tokens: in packed pages, and in those of windows where a spec has them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jkvq.attention.layer_view import LayerView
from jkvq.attention.step_plan import GroupPlan, PackPlan, Targets
from jkvq.cache.exact_pages import read_tokens, rounded, write_tokens
from jkvq.cache.layout import ExactPages, LayerGroup
from jkvq.pallas_kernels.formats.packed import Packed
from jkvq.pallas_kernels.reference.scatter import scatter

Keys = Float[Array, "B T K H"]
Values = Float[Array, "B T K C"]
# Puts tokens in the basis of the cache into packed pages of a layer.
WritePages = Callable[[LayerView, Keys, Values, Targets], tuple[Packed, Packed]]


def write_plainly(view: LayerView, k: Keys, v: Values, to: Targets) -> tuple[Packed, Packed]:
    """Encodes tokens and scatters them, by plain JAX; any codec."""
    storage = view.storage
    key, value = (
        scatter(pages, codec.encode(x), view.index, to.page, to.slot)
        for pages, codec, x in zip((storage.key, storage.value), view.codecs, (k, v), strict=True)
    )
    return key, value


def write_if_any(view: LayerView, k: Keys, v: Values, to: Targets) -> tuple[Packed, Packed]:
    """As ``write_plainly``, but encodes nothing if no token is real: a page is seldom due."""
    kept = view.storage.key, view.storage.value
    return jax.lax.cond(to.real.any(), lambda: write_plainly(view, k, v, to), lambda: kept)


def pack_plainly(view: LayerView, plan: PackPlan) -> LayerGroup:
    """The storage with what is due in packed pages."""
    exact, source = view.storage.exact, plan.source
    assert exact is not None
    at = view.index, source.page, source.slot
    k, v = (
        read_tokens(pages, codec, *at)
        for pages, codec in zip((exact.key, exact.value), view.window_codecs, strict=True)
    )
    return LayerGroup(*write_plainly(view, k, v, plan.to), exact)


def write_exact(view: LayerView, k: Keys, v: Values, to: Targets) -> ExactPages:
    """The pages of windows with tokens in them."""
    pages, codecs = view.storage.exact, view.window_codecs
    assert pages is not None
    where = view.index, to.page, to.slot, to.real
    return ExactPages(
        write_tokens(pages.key, codecs[0], *where, k),
        write_tokens(pages.value, codecs[1], *where, v),
    )


def store_chunk(
    view: LayerView,
    k: Keys,
    v: Values,
    old: tuple[Float[Array, "B W K H"], Float[Array, "B W K C"]] | None,
    plan: GroupPlan,
    write: WritePages,
) -> LayerGroup:
    """The storage with a chunk in the pages of a layer, of which ``old`` was read before.

    Tokens that are packed when the chunk ends go to packed pages at once: those of the chunk, and
    those of ``old`` that are due. A token is coded as windows hold it, whether it was there or not.
    """
    exact, to = view.storage.exact, plan.write
    assert to is not None
    if exact is None or plan.exact is None or plan.pack is None or old is None:
        return LayerGroup(*write(view, k, v, to), None)
    due = slice(view.spec.sink, view.spec.sink + plan.pack.to.page.shape[1])
    all_k, all_v = (
        jnp.concatenate([held[:, due], rounded(codec, x)], axis=1)
        for codec, held, x in zip(view.window_codecs, old, (k, v), strict=True)
    )
    to = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), plan.pack.to, to)
    # What is not written anyway is taken from what was read: pages are then written after they are
    # read, and XLA updates them in place.
    stays = plan.exact.new.real[..., None, None]
    k, v = (
        jnp.where(stays, x.astype(held.dtype), held[:, :1])
        for x, held in zip((k, v), old, strict=True)
    )
    return LayerGroup(*write(view, all_k, all_v, to), write_exact(view, k, v, plan.exact.new))
