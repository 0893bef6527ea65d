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

from jkvq.pallas_kernels.formats import lloyd
from jkvq.pallas_kernels.formats.packing import WORD, part_widths

_MAGIC = 0x6400  # 1024 in float16
_ONE = 0x3C00  # 1 in float16
_MANTISSA = 10  # bits of it
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
    args, operand = [words], "$2"
    if isinstance(mask, int):
        operand = hex(mask * 0x10001)
    else:
        args.append(jnp.broadcast_to(mask, words.shape))
    # Two words a register: ((words >> shift) & mask | magic) - 1024
    return _by_two(
        f"""
        shr.b32 t, $1, {piece.shift};
        lop3.b32 t, t, {operand}, {hex(_MAGIC * 0x10001)}, 0xEA;
        mov.b32 k, {_pair(-1024)};
        add.f16x2 $0, t, k;
        """,
        args,
    )


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


def level_tile(words: list, parts: list[Piece], channels: int, *, interpret: bool):
    """The levels (lloyd.py) of a piece in float16, from the words of each part of its codes."""
    bits = sum(part.bits for part in parts)
    tiles = [
        code_tile(tile, part, interpret=interpret) for tile, part in zip(words, parts, strict=True)
    ]
    # u = (2c + 1) / 2^bits - 1
    steps = [part.worth / weight(part) * 2.0 ** (1 - bits) for part in parts]
    coefficients = lloyd.level_coefficients(bits, channels)
    return _polynomial(tiles, steps, 2.0**-bits - 1, coefficients, interpret=interpret)


def stream_tile(low, high, bit, width, levels: list, unit, *, interpret: bool):
    """unit * level in float16, [channels, p], of codes that begin at a bit of a word and may go on
    in the next one; ``bit``, ``width`` and ``levels`` (coefficients) are [channels, 1].

    The codes become the first bits of the mantissa of 1: the float16 number t = 1 + c / 2^width.
    """
    shift = WORD + _MANTISSA - width - bit  # of both words, to the upper mantissa
    mask = jnp.left_shift(jnp.int32(1), _MANTISSA) - jnp.left_shift(jnp.int32(1), _MANTISSA - width)
    if interpret:
        low, high = (words.astype(jnp.uint32) for words in (low, high))
        both = (low | (high << WORD)) << shift.astype(jnp.uint32)
        bits = ((both >> WORD) & mask.astype(jnp.uint32)) | _ONE
        tile = lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16)
    else:
        rows = [jnp.broadcast_to(x, low.shape).astype(jnp.uint16) for x in (shift, mask)]
        # Two channels or two tokens a register: each with its own shift.
        tile = _by_two(
            f"""
            prmt.b32 t, $1, $2, 0x5410;
            prmt.b32 u, $1, $2, 0x7632;
            and.b32 s, $3, 0xFFFF;
            shl.b32 t, t, s;
            shr.b32 s, $3, 16;
            shl.b32 u, u, s;
            prmt.b32 t, t, u, 0x7632;
            lop3.b32 $0, t, $4, {hex(_ONE * 0x10001)}, 0xEA;
            """,
            [low, high, *rows],
        )
    # u = (2c + 1) / 2^width - 1 = 2 t - 3 + 1 / 2^width, all of it exact
    base = lax.bitcast_convert_type(((15 - width) << 10).astype(jnp.uint16), jnp.float16)
    return _polynomial([tile], [2.0], base - jnp.float16(3), levels, unit, interpret=interpret)


def _polynomial(tiles: list, steps: list, base, coefficients, unit=None, *, interpret: bool):
    """u (c0 + c1 u^2 + ...) in float16, times any unit; u = base + the sum of tiles * steps."""
    if interpret:
        base, *coefficients = (jnp.asarray(x, jnp.float16) for x in (base, *coefficients))
        u = base
        for tile, step in zip(tiles, steps, strict=True):
            u = u + tile * jnp.asarray(step, jnp.float16)
        total = coefficients[-1]
        for coefficient in coefficients[-2::-1]:
            total = total * (u * u) + coefficient
        return u * total if unit is None else u * unit * total
    args, lines = [], []

    def load(register: str, x):
        if isinstance(x, float):
            lines.append(f"mov.b32 {register}, {_pair(x)};")
        else:
            args.append(jnp.broadcast_to(x, tiles[0].shape).astype(jnp.float16))
            lines.append(f"mov.b32 {register}, ${len(args)};")

    load("u", base)
    for tile, step in zip(tiles, steps, strict=True):
        load("t", tile)
        load("k", step)
        lines.append("fma.rn.f16x2 u, t, k, u;")
    lines.append("mul.f16x2 s, u, u;")
    load("t", coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        load("k", coefficient)
        lines.append("fma.rn.f16x2 t, t, s, k;")
    if unit is not None:
        load("k", unit)
        lines.append("mul.f16x2 u, u, k;")
    lines.append("mul.f16x2 $0, t, u;")
    return _by_two(" ".join(lines), args)


def _pair(x: float) -> str:
    """A number in float16, twice in one register."""
    return hex(int(np.float16(x).view(np.uint16)) * 0x10001)


def _by_two(asm: str, args: list):
    """A float16 tile by instructions on two 16-bit elements at once, with registers k, s, t, u."""
    (tile,) = plt.elementwise_inline_asm(
        f"{{ .reg .b32 k, s, t, u; {asm} }}",
        args=args,
        constraints=",".join(["=r"] + ["r"] * len(args)),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float16)],
    )
    return tile


def dot(a, b, contract: tuple[int, int]):
    """A matrix product in float32."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
