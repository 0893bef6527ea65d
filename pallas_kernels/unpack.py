"""Codes out of their words, as tiles of float16 numbers for matrix products.

Codes are never converted to floats: or-ing a code into the mantissa of 1024 makes the float16
number 1024 + w c, with w the place of its bits in the byte, and subtracting 1024 leaves w c. The
weight w is taken out of q, or of the sum over p. (Leaving the 1024 in, to take it out of the sums,
is one instruction less but failed the tests' bounds: tensor cores seem to add with too few bits.)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plt

from jkvq.pallas_kernels import lloyd
from jkvq.pallas_kernels.packing import WORD, part_widths

_MAGIC = 0x6400  # 1024 in float16
_NARROWEST = 16  # channels that a matrix product takes at least


class Piece(NamedTuple):
    """Neighbouring channels whose codes come out of their words with one mask."""

    start: int  # channel
    width: int  # channels
    group: int  # that they share scale and lo with
    word: int  # where their words begin
    words: int  # how many; the channels go round them several times if they are fewer
    shift: int  # 0 or 8: the byte of the word
    place: int  # of the first channel's bits in that byte
    bits: int
    worth: int  # of a code's unit: 4 for the third bit

    @property
    def wrap(self) -> int | None:
        return self.words if self.words < self.width else None


def pieces(bits: int, channels: int, group: int) -> list[list[Piece]]:
    """For each part of a code the pieces that make up a head, the same channels in every part."""
    found = []
    width = max(_NARROWEST, *(min(channels * part // WORD, group) for part in part_widths(bits)))
    offset = worth = 0
    for part in part_widths(bits):
        words = channels * part // WORD
        found.append(
            [
                Piece(
                    start=start,
                    width=width,
                    group=start // group,
                    word=offset + start % words,
                    words=min(words, width),
                    shift=start // words * part // 8 * 8,
                    place=start // words * part % 8,
                    bits=part,
                    worth=1 << worth,
                )
                for start in range(0, channels, width)
            ]
        )
        offset, worth = offset + words, worth + part
    return found


def code_tile(words, piece: Piece, *, interpret: bool):
    """The codes of a piece as float16 numbers weight * code, from its words [p, width]."""
    mask = _mask(piece)
    if interpret:
        bits = ((words >> piece.shift) & mask) | _MAGIC
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16) - jnp.float16(1024)
    args, operand, constraints = [words], "$2", "=r,r,r"
    if isinstance(mask, int):
        operand, constraints = hex(mask * 0x10001), "=r,r"
    else:
        args.append(jnp.broadcast_to(mask, words.shape))
    # Two words a register: ((words >> shift) & mask | magic) - 1024
    asm = f"""{{
        .reg .b32 t, m;
        shr.b32 t, $1, {piece.shift};
        lop3.b32 t, t, {operand}, {hex(_MAGIC * 0x10001)}, 0xEA;
        mov.b32 m, {hex((_MAGIC | 0x8000) * 0x10001)};
        add.f16x2 $0, t, m;
    }}"""
    (tile,) = plt.elementwise_inline_asm(
        asm,
        args=args,
        constraints=constraints,
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.float16)],
    )
    return tile


def _place(piece: Piece):
    """Where each channel's bits begin in the byte: a number, or one for each column."""
    if piece.wrap is None:
        return piece.place
    turn = lax.broadcasted_iota(jnp.int32, (1, piece.width), 1) // piece.words
    return piece.place + piece.bits * turn


def _mask(piece: Piece):
    place = _place(piece)
    ones = (1 << piece.bits) - 1
    if isinstance(place, int):
        return ones << place
    return jnp.left_shift(jnp.int32(ones), place).astype(jnp.uint16)


def weight(piece: Piece):
    """What a code's unit counts in a tile: a number, or one for each column, [1, width]."""
    place = _place(piece)
    if isinstance(place, int):
        return float(1 << place)
    return jnp.left_shift(jnp.int32(1), place).astype(jnp.float32)


def level_tile(words: list, parts: list[Piece], *, interpret: bool):
    """The Lloyd-Max levels of a piece in float16, from the words of each part of its codes."""
    bits = sum(part.bits for part in parts)
    levels = np.asarray(lloyd.gaussian_levels(bits), np.float16).view(np.uint16)
    if interpret:
        codes, shift = jnp.int32(0), 0
        for tile, part in zip(words, parts, strict=True):
            low = (tile.astype(jnp.int32) >> (part.shift + _place(part))) & ((1 << part.bits) - 1)
            codes, shift = codes | (low << shift), shift + part.bits
        found = jnp.zeros(codes.shape, jnp.uint16)
        for code, level in enumerate(levels.tolist()):
            found = jnp.where(codes == code, jnp.uint16(level), found)
        return lax.bitcast_convert_type(found, jnp.float16)
    return _looked_up(words, parts, levels)


def _looked_up(words: list, parts: list[Piece], levels: np.ndarray):
    """``level_tile`` by byte permutations, which look four codes up at once in eight bytes.

    Levels are odd: code c has the sign of its top bit and one of 2^(bits - 1) magnitudes.
    """
    half = len(levels) // 2
    magnitudes = np.resize(levels[half:], 8)  # of the positive ones, ascending
    table = [
        hex(int.from_bytes(byte[i : i + 4].astype(np.uint8).tobytes(), "little"))
        for byte in (magnitudes & 0xFF, magnitudes >> 8)
        for i in (0, 4)
    ]
    args, lines = [], []

    def operand(tile) -> int:
        args.append(tile)
        return 2 * len(args)  # the first of its two registers

    sources = []
    for tile, part in zip(words, parts, strict=True):
        place = None
        if part.wrap is not None:  # it differs by column, but not within a register
            columns = jnp.broadcast_to(_place(part) + part.shift, tile.shape)
            place = operand(columns.astype(jnp.uint16))
        sources.append((operand(tile), place, part))
    for j in range(2):
        lines.append(f"mov.b32 c{j}, 0;")
        shift = 0
        for register, place, part in sources:
            amount = part.shift + part.place
            if place is not None:
                lines.append(f"and.b32 u, ${place + j}, 0xFFFF;")
                amount = "u"
            lines += [
                f"shr.b32 t, ${register + j}, {amount};",
                f"and.b32 t, t, {hex(((1 << part.bits) - 1) * 0x10001)};",
                f"shl.b32 t, t, {shift};",
                f"or.b32 c{j}, c{j}, t;",
            ]
            shift += part.bits
        lines += [
            # n is half where the level is negative; such codes are mirrored, c ^ (half - 1)
            f"not.b32 t, c{j};",
            f"and.b32 n{j}, t, {hex(half * 0x10001)};",
            f"shr.b32 t, n{j}, {half.bit_length() - 1};",
            f"sub.u32 t, n{j}, t;",
            f"xor.b32 c{j}, c{j}, t;",
            f"and.b32 c{j}, c{j}, {hex((half - 1) * 0x10001)};",
            f"shl.b32 n{j}, n{j}, {16 - half.bit_length()};",  # to the sign
            f"shr.b32 t, c{j}, 12;",  # both codes into one byte
            f"or.b32 c{j}, c{j}, t;",
            f"and.b32 c{j}, c{j}, 0xFF;",
        ]
    lines += [
        "shl.b32 t, c1, 8;",
        "or.b32 c0, c0, t;",
        f"mov.b32 t, {table[0]};",
        f"mov.b32 u, {table[1]};",
        "prmt.b32 t, t, u, c0;",  # four low bytes
        f"mov.b32 u, {table[2]};",
        f"mov.b32 c1, {table[3]};",
        "prmt.b32 u, u, c1, c0;",  # four high bytes
        "prmt.b32 c0, t, u, 0x5140;",
        "prmt.b32 c1, t, u, 0x7362;",
        "xor.b32 $0, c0, n0;",
        "xor.b32 $1, c1, n1;",
    ]
    asm = "{ .reg .b32 t, u, c0, c1, n0, n1; " + " ".join(lines) + " }"
    (tile,) = plt.elementwise_inline_asm(
        asm,
        args=args,
        constraints=",".join(["=r", "=r"] + ["r"] * (2 * len(args))),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words[0].shape, jnp.float16)],
    )
    return tile


def dot(a, b, contract: tuple[int, int]):
    """A matrix product in float32."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
