"""Packing small codes into bytes, in planes.

A code of ``bits`` bits is cut, low bits first, into parts of 8, 4, 2 or 1 bits (3 = 2 + 1), and
each part of all H channels makes a plane. With n = 8 / width parts a byte, byte j of a plane holds
the channels j, j + H/n, j + 2H/n, ... from the low bits up: unpacking gives n contiguous tiles of
H/n channels, with no interleaving.

Codes of unequal widths go into a stream of bits instead: bit 0 of every channel, then bit 1 of
those that have one, and so on; channels stand widest first, so that each such run is a prefix.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt8

_EIGHT = np.arange(8, dtype=np.uint8)


def plane_widths(bits: int) -> list[int]:
    """The widths of the planes of a code, low bits first."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def packed_bytes(channels: int, bits: int) -> int:
    """Bytes of ``channels`` codes; refuses a number that does not fill whole bytes."""
    for width in plane_widths(bits):
        if channels * width % 8:
            raise ValueError(f"{channels} codes of {bits} bits do not fill whole bytes")
    return channels * bits // 8


def pack(codes: UInt8[Array, "*rows H"], bits: int) -> UInt8[Array, "*rows bytes"]:
    """Codes below 2^bits, packed."""
    planes, shift = [], 0
    for width in plane_widths(bits):
        part = (codes >> shift) & (2**width - 1)
        tiles = jnp.split(part, 8 // width, axis=-1)
        planes.append(sum((tile << (i * width) for i, tile in enumerate(tiles)), jnp.uint8(0)))
        shift += width
    return jnp.concatenate(planes, axis=-1)


def unpack(packed: UInt8[Array, "*rows bytes"], bits: int) -> UInt8[Array, "*rows H"]:
    """The codes that were packed."""
    channels, codes, shift, start = packed.shape[-1] * 8 // bits, jnp.uint8(0), 0, 0
    for width in plane_widths(bits):
        plane = packed[..., start : start + channels * width // 8]
        tiles = [(plane >> (i * width)) & (2**width - 1) for i in range(8 // width)]
        codes = codes | (jnp.concatenate(tiles, axis=-1) << shift)
        shift += width
        start += channels * width // 8
    return codes


def pack_stream(
    codes: UInt8[Array, "B T K H"], width: Int[Array, "K H"], size: int
) -> UInt8[Array, "B T K bytes"]:
    """Codes of ``width`` bits, descending, in ``size`` bytes a head."""
    B, T, K, _ = codes.shape
    bits = (codes[..., None] >> _EIGHT.reshape(1, 1, 1, 1, 8)) & 1  # [B, T, K, H, 8]
    stream = jnp.zeros((B, T, K, 8 * size), jnp.uint8)
    head = jnp.arange(K)[:, None, None]
    stream = stream.at[:, :, head, _addresses(width)].set(bits, mode="drop")
    octets = stream.reshape(B, T, K, size, 8) << _EIGHT.reshape(1, 1, 1, 1, 8)
    return octets.sum(-1, dtype=jnp.uint8)


def unpack_stream(
    packed: UInt8[Array, "B T K bytes"], width: Int[Array, "K H"]
) -> UInt8[Array, "B T K H"]:
    """The codes that were packed."""
    B, T, K, size = packed.shape
    stream = (packed[..., None] >> _EIGHT.reshape(1, 1, 1, 1, 8)) & 1
    head = jnp.arange(K)[:, None, None]
    bits = stream.reshape(B, T, K, 8 * size).at[:, :, head, _addresses(width)]
    bits = bits.get(mode="fill", fill_value=0)  # [B, T, K, H, 8]
    return (bits << _EIGHT.reshape(1, 1, 1, 1, 8)).sum(-1, dtype=jnp.uint8)


def _addresses(width: Int[Array, "K H"]) -> Int[Array, "K H 8"]:
    """Where bit i of each channel stands in its head's stream; past the end where it has none."""
    has = width[..., None] > jnp.arange(8)[None, None]
    count = has.sum(1)  # of each bit, [K, 8]
    before = jnp.cumsum(count, axis=-1) - count
    address = before[:, None] + jnp.arange(width.shape[1])[None, :, None]
    return jnp.where(has, address, jnp.iinfo(jnp.int32).max)
