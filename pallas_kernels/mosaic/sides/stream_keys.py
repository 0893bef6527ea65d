"""Keys of unequal widths in a warp: Lloyd's codes in a stream of bits, tokens last.

What is known of a channel, where its code begins, how wide it is and its levels, is the same for
all tokens and lies in a table. A register holds two tokens of a channel: both codes are cut out at
once, and both levels are polynomials in 16-bit floats (lloyd.py). Scores are products of such
floats (floats.py).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jkvq.pallas_kernels.formats.lloyd import TERMS, Allocation
from jkvq.pallas_kernels.formats.packing import WORD
from jkvq.pallas_kernels.mosaic.lanes import Value
from jkvq.pallas_kernels.mosaic.sides.floats import FloatQuery, channels_of, float_query
from jkvq.pallas_kernels.mosaic.tile import Tile

ENTRY = 12  # words of a channel in the table
_ONE = 0x3C003C00  # 1.0 in both halves; its last bits are a code / 1024
_LESS_ONE = 0xBC00BC00


def channel_table(allocation: Allocation, words: int, tokens: int) -> Int[Array, "K H entry"]:
    """Of each channel: where its two words are and its unit, in bytes; the bit of its code; masks
    of the parts of the code in either word; factor and summand of u; the levels' coefficients.
    """
    width, offset = allocation.width, allocation.offset
    first, bit = offset // WORD, offset % WORD
    in_first = jnp.left_shift(1, jnp.minimum(width, WORD - bit)) - 1
    in_next = jnp.left_shift(1, width) - 1 - in_first
    size = 2 * tokens
    exponent = width.astype(jnp.float32)
    floats = jnp.exp2(11 - exponent), jnp.exp2(-exponent) - 1
    return jnp.stack(
        [
            first * size,
            jnp.minimum(first + 1, words - 1) * size,
            allocation.group * size,
            bit,
            *(_both(mask) for mask in (in_first, in_next)),
            *(_both(_half_bits(number)) for number in floats),
            *(_both(_half_bits(allocation.levels[..., i])) for i in range(TERMS)),
        ],
        axis=-1,
    )


def _half_bits(number) -> Int[Array, "K H"]:
    half = jax.lax.bitcast_convert_type(number.astype(jnp.float16), jnp.uint16)
    return half.astype(jnp.int32)


def _both(half: Int[Array, "K H"]) -> Int[Array, "K H"]:
    """16 bits in both halves."""
    return half | (half << 16)


class StreamKeys:
    """Scores of a tile of keys; ``table`` is where the head's part of the channels' table begins.

    A tile is a whole page, of 64 tokens: eight of each thread.
    """

    def __init__(self, tile: Tile, channels: int, table: Value):
        self.tile, self.table = tile, table
        self._channels = channels_of(tile, channels)

    def query(self, load, scale: float) -> FloatQuery:
        """``load`` gives the query's channel, by its number, of query head thread // 8."""
        values = [[load(channel) for channel in four] for four in self._channels]
        return float_query(self.tile, values, "f16", scale)

    def scores(self, stored: list[Value], query: FloatQuery, less: Value) -> list[Value]:
        """To base 2, plus ``less``, of each of the thread's tokens; of query head c."""
        tile, o = self.tile, self.tile.o
        first = o.mul(tile.r, o.i(2 * tile.each))
        codes, units = (o.add(start, first) for start in stored)
        pairs = tile.each // 2
        totals = [[o.f(0.0)] * 4 for _ in range(pairs)]
        for channels, own in zip(self._channels, query.steps, strict=True):
            four = [self._levels(codes, units, channel) for channel in channels]
            for m, total in enumerate(totals):
                halves = [
                    [o.bytes_of(four[k][m], four[k + 1][m], o.i(token)) for token in _TOKENS]
                    for k in (0, 2)
                ]
                totals[m] = o.multiply_floats(total, [*halves[0], *halves[1]], own, "f16")
        dots = [o.fadd(total[k], total[k + 1]) for total in totals for k in (0, 2)]
        return [o.ffma(dot, o.f(query.scale), less) for dot in tile.turned(dots)]

    def _levels(self, codes: Value, units: Value, channel: Value) -> list[Value]:
        """unit * level of a channel, of the thread's tokens in their order, two in a register."""
        o, count = self.tile.o, self.tile.each // 2
        entry = o.load_row(self.table, o.mul(channel, o.i(ENTRY)), ENTRY)
        first, after, unit, bit, in_first, in_next, factor, summand, *levels = entry
        back, found = o.sub(o.i(WORD), bit), []
        rows = [o.load_shared(o.add(codes, at), 0, count) for at in (first, after)]
        scales = o.load_shared(o.add(units, unit), 0, count)
        for one, other, scale in zip(*rows, scales, strict=True):
            code = o.or_(
                o.and_(o.shr_by(one, bit), in_first), o.and_(o.shl_by(other, back), in_next)
            )
            u = o.halves_fma(o.or_(code, o.i(_ONE)), o.i(_ONE), o.i(_LESS_ONE))
            u = o.halves_fma(u, factor, summand)
            square, level = o.halves_mul(u, u), levels[-1]
            for coefficient in levels[-2::-1]:
                level = o.halves_fma(level, square, coefficient)
            found.append(o.halves_mul(o.halves_mul(u, scale), level))
        return found


_TOKENS = (0x5410, 0x7632)  # the lower halves of two registers, the upper ones
