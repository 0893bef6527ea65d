"""Tokens in 16-bit pages: float16 numbers, four times finer than bfloat16.

A cache of float32 has float32 there.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jkvq.cache.specs.spec import CacheSpec
from jkvq.pallas_kernels.formats.packed import LayerIndex
from jkvq.pallas_kernels.formats.words import from_words, to_words

Pages = UInt[Array, "L P K p H"]


def _floats(pages: Pages):
    return jnp.float16 if pages.dtype == jnp.uint16 else jnp.float32


def read_pages(
    pages: Pages, layer: LayerIndex, table: Int[Array, "B n"]
) -> Float[Array, "B W K H"]:
    """The tokens of some pages, side by side."""
    found = pages.at[layer, table].get(mode="promise_in_bounds")
    B, n, K, p, H = found.shape
    return from_words(found, _floats(pages)).swapaxes(2, 3).reshape(B, n * p, K, H)


def read_tokens(
    pages: Pages, layer: LayerIndex, page: Int[Array, "B T"], slot: Int[Array, "B T"]
) -> Float[Array, "B T K H"]:
    """Tokens by their pages and slots."""
    found = pages.at[layer, page, :, slot].get(mode="promise_in_bounds")
    return from_words(found, _floats(pages))


def write_tokens(
    pages: Pages,
    layer: LayerIndex,
    page: Int[Array, "B T"],
    slot: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    tokens: Float[Array, "B T K H"],
) -> Pages:
    """The pages with those of these tokens that are real."""
    words = to_words(tokens, _floats(pages))
    # Were all others written to one place, a GPU would wait for each of them.
    page = jnp.where(real, page, pages.shape[1])
    return pages.at[layer, page, :, slot].set(words, mode="drop")


def rounded(pages: Pages, tokens: Float[Array, "B T K H"]) -> Float[Array, "B T K H"]:
    """Tokens as these pages would hold them."""
    return from_words(to_words(tokens, _floats(pages)), _floats(pages))


def seen_exactly(
    spec: CacheSpec, position: Int[Array, "B S"], boundary: Int[Array, "B T"]
) -> Bool[Array, "B T S"]:
    """Which exact tokens, by position, each query with a boundary reads exactly."""
    position = position[:, None]
    kept = (position < spec.sink) | (position - spec.sink >= boundary[..., None])
    return (position >= 0) & kept
