"""Packing small codes into 16-bit words.

Codes of equal width go in planes. A code of ``bits`` bits is cut, low bits first, into parts of 8,
4, 2 or 1 bits (3 = 2 + 1), and each part of all H channels takes words of its own: with n = 16 /
width parts a word, word j of a part holds the channels j, j + H/n, j + 2H/n, ... from the low bits
up. Unpacking gives n contiguous tiles of H/n channels, with no interleaving.

Codes of unequal widths go into a stream of bits instead, one code after the other.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Integer, UInt8, UInt16

WORD = 16


def part_widths(bits: int) -> list[int]:
    """The widths of the parts of a code, low bits first."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def packed_words(channels: int, bits: int) -> int:
    """Words of ``channels`` codes; refuses a number that does not fill whole words."""
    for width in part_widths(bits):
        if channels * width % WORD:
            raise ValueError(f"{channels} codes of {bits} bits do not fill whole 16-bit words")
    return channels * bits // WORD


def pack(codes: Integer[Array, "*rows H"], bits: int) -> UInt16[Array, "*rows words"]:
    """Codes below 2^bits, packed."""
    return jnp.concatenate(pack_parts(codes.astype(jnp.int32), bits), axis=-1)


def pack_parts(codes: Int[Array, "*rows H"], bits: int) -> list[UInt16[Array, "*rows words"]]:
    """The words of each part of the codes, of which only the last ``bits`` bits count."""
    words, shift = [], 0
    for width in part_widths(bits):
        part = (codes >> shift) & (2**width - 1)
        planes = part.reshape(*codes.shape[:-1], WORD // width, -1)
        place = width * lax.broadcasted_iota(jnp.int32, planes.shape, planes.ndim - 2)
        words.append((planes << place).sum(-2).astype(jnp.uint16))
        shift += width
    return words


def unpack(packed: UInt16[Array, "*rows words"], bits: int) -> UInt8[Array, "*rows H"]:
    """The codes that were packed."""
    channels, codes, shift, start = packed.shape[-1] * WORD // bits, jnp.uint16(0), 0, 0
    for width in part_widths(bits):
        part = packed[..., None, start : start + channels * width // WORD]
        place = jnp.arange(0, WORD, width, dtype=jnp.uint16)[:, None]
        place = jnp.expand_dims(place, range(packed.ndim - 1))
        planes = (part >> place) & (2**width - 1)
        codes = codes | (planes.reshape(*packed.shape[:-1], channels) << shift)
        shift += width
        start += channels * width // WORD
    return codes.astype(jnp.uint8)


def stream_offsets(width: Int[Array, "*L K H"]) -> Int[Array, "*L K H"]:
    """The bit at which each channel's code begins in its head's stream."""
    return jnp.cumsum(width, axis=-1) - width


def pack_stream(
    codes: UInt8[Array, "B T K H"], width: Int[Array, "K H"], words: int
) -> UInt16[Array, "B T K words"]:
    """Codes of ``width`` bits, one after the other, in so many words a head."""
    offset = stream_offsets(width)
    shifted = codes.astype(jnp.uint32) << (offset % WORD).astype(jnp.uint32)[None, None]
    parts = (shifted & 0xFFFF).astype(jnp.float32), (shifted >> WORD).astype(jnp.float32)
    total = jnp.float32(0)
    for i, part in enumerate(parts):  # a code may reach into the next word
        place = jax.nn.one_hot(offset // WORD + i, words)
        # The bits of a word add up without a carry, exactly in float32.
        total = total + jnp.einsum("btkh,khw->btkw", part, place, precision="highest")
    return total.astype(jnp.uint16)


def unpack_stream(
    packed: UInt16[Array, "B T K words"], width: Int[Array, "K H"]
) -> UInt8[Array, "B T K H"]:
    """The codes that were packed."""
    offset = stream_offsets(width)
    first = offset // WORD
    low, high = (
        jnp.take_along_axis(packed, word[None, None], axis=-1).astype(jnp.uint32)
        for word in (first, jnp.minimum(first + 1, packed.shape[-1] - 1))
    )
    both = low | (high << WORD)
    mask = (1 << width.astype(jnp.uint32)) - 1
    return ((both >> (offset % WORD).astype(jnp.uint32)[None, None]) & mask[None, None]).astype(
        jnp.uint8
    )
