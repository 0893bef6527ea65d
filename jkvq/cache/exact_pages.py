"""Tokens in the pages of windows: float16 numbers, eight times finer than bfloat16, or 8-bit codes.

A cache of float32 has float32 there.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkvq.cache.specs.spec import CacheSpec, SideSpec
from jkvq.pallas_kernels.formats.codecs import AffineCodec, Codec, FloatCodec
from jkvq.pallas_kernels.formats.packed import LayerIndex, Packed
from jkvq.pallas_kernels.reference.paged_attention import load_pages, load_tokens
from jkvq.pallas_kernels.reference.scatter import scatter


def window_codec(side: SideSpec) -> FloatCodec | AffineCodec:
    """How a side is held in windows, of `CacheSpec.window_sides`."""
    if side.codec == "float":
        return FloatCodec(jnp.float32 if side.bits == 32 else jnp.float16)
    return AffineCodec(side.bits, side.group, side.step)


def read_pages(
    pages: Packed, codec: Codec, layer: LayerIndex, table: Int[Array, "B n"]
) -> Float[Array, "B W K H"]:
    """The tokens of some pages, side by side."""
    return _decoded(codec, load_pages(pages, layer, table))


def read_tokens(
    pages: Packed,
    codec: Codec,
    layer: LayerIndex,
    page: Int[Array, "B T"],
    slot: Int[Array, "B T"],
) -> Float[Array, "B T K H"]:
    """Tokens by their pages and slots."""
    return _decoded(codec, load_tokens(pages, layer, page, slot))


def write_tokens(
    pages: Packed,
    codec: Codec,
    layer: LayerIndex,
    page: Int[Array, "B T"],
    slot: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    tokens: Float[Array, "B T K H"],
) -> Packed:
    """The pages with those of these tokens that are real."""
    # Were all others written to one place, a GPU would wait for each of them.
    page = jnp.where(real, page, pages.codes.shape[1])
    return scatter(pages, codec.encode(tokens), layer, page, slot, mode="drop")


def rounded(codec: Codec, tokens: Float[Array, "B T K H"]) -> Float[Array, "B T K H"]:
    """Tokens as windows hold them."""
    return _decoded(codec, codec.encode(tokens))


def _decoded(codec: Codec, tokens: Packed) -> Float[Array, "B T K H"]:
    return codec.decode(tokens, jnp.ones(tokens.codes.shape[:2], bool))


def seen_exactly(
    spec: CacheSpec, position: Int[Array, "B S"], boundary: Int[Array, "B T"]
) -> Bool[Array, "B T S"]:
    """Which tokens of windows, by position, each query with a boundary reads there."""
    position = position[:, None]
    kept = (position < spec.sink) | (position - spec.sink >= boundary[..., None])
    return (position >= 0) & kept
