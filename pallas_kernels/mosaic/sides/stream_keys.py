"""Keys of unequal widths in a warp: Lloyd's codes in a stream of bits, tokens last.

What is known of a channel, where its code begins, how wide it is and its levels, is the same for
all tokens and lies in a table. A register holds two tokens of a channel: both codes are cut out at
once, and both levels are polynomials in 16-bit floats (lloyd.py). Scores are products of such
floats (floats.py).
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jkvq.pallas_kernels.formats.lloyd import TERMS, Allocation
from jkvq.pallas_kernels.formats.packing import WORD
from jkvq.pallas_kernels.mosaic.lanes import Value
from jkvq.pallas_kernels.mosaic.sides.floats import FloatQuery, float_query
from jkvq.pallas_kernels.mosaic.tile import Tile

ENTRY = 4  # words of a channel in the table
_ONE = 0x3C003C00  # 1.0 in both halves; its last bits are a code / 1024
_LESS_ONE = 0xBC00BC00
_TINY = 0x10001000  # 2^-11 in both halves


def channel_table(allocation: Allocation) -> Int[Array, "K H entry"]:
    """Of each channel: where its code is; masks of its code; the levels' coefficients, by halves.

    Where: its first word and its unit, a byte each, then the code's first bit and its width, four
    bits each. The masks: what of a word shifted down belongs to the first one; the whole code.
    """
    width, offset = allocation.width, allocation.offset
    first, bit = offset // WORD, offset % WORD
    place = first | allocation.group << 8 | bit << 16 | width << 20
    in_first, whole = jnp.left_shift(1, WORD - bit) - 1, jnp.left_shift(1, width) - 1
    levels = [_half_bits(allocation.levels[..., i]) for i in range(TERMS)]
    pairs = (levels[i] | levels[i + 1] << 16 for i in range(0, TERMS, 2))
    return jnp.stack([place, in_first | whole << 16, *pairs], axis=-1)


def _half_bits(number) -> Int[Array, "K H"]:
    half = jax.lax.bitcast_convert_type(number.astype(jnp.float16), jnp.uint16)
    return half.astype(jnp.int32)


class StreamKeys:
    """Scores of a tile of keys; ``table`` is where the head's part of the channels' table begins.

    A tile is a whole page, of 64 tokens: eight of each thread.
    """

    def __init__(self, tile: Tile, channels: int, table: Value):
        self.tile, self.table = tile, table
        # Threads of the same tokens read neighbours, which mostly lie in the same words: rows of
        # different words would meet in the same banks.
        o, step = tile.o, 16
        self._channels = [
            [o.add(tile.c, o.i(at + k)) for k in range(0, step, 4)]
            for at in range(0, channels, step)
        ]

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
        levels = self._all_levels(codes, units)
        for own in query.steps:
            four = [next(levels) for _ in range(4)]
            for m, total in enumerate(totals):
                halves = [
                    [o.bytes_of(four[k][m], four[k + 1][m], o.i(token)) for token in _TOKENS]
                    for k in (0, 2)
                ]
                totals[m] = o.multiply_floats(total, [*halves[0], *halves[1]], own, "f16")
        dots = [o.fadd(total[k], total[k + 1]) for total in totals for k in (0, 2)]
        return [o.ffma(dot, o.f(query.scale), less) for dot in tile.turned(dots)]

    def _all_levels(self, codes: Value, units: Value) -> Iterator[list[Value]]:
        """Those of each channel; what it needs is loaded while those before it are worked out."""
        o, channels = self.tile.o, [channel for four in self._channels for channel in four]

        def entry(channel: Value) -> list[Value]:
            return o.load_row(self.table, o.mul(channel, o.i(ENTRY)), ENTRY)

        entries = [entry(channel) for channel in channels[:2]]
        rows = [self._rows(codes, units, entries[0])]
        for number in range(len(channels)):
            entries += [entry(channel) for channel in channels[number + 2 : number + 3]]
            rows += [self._rows(codes, units, own) for own in entries[number + 1 : number + 2]]
            yield self._levels(entries[number], rows[number])

    def _rows(self, codes: Value, units: Value, entry: list[Value]) -> list[list[Value]]:
        """The thread's tokens of a channel's two words, and their units.

        What follows a page's last word is read with it, but no code reaches there.
        """
        tile, o, count = self.tile, self.tile.o, self.tile.each // 2
        row = 2 * tile.tokens

        def address(start: Value, number: Value) -> Value:
            return o.add(start, o.mul(o.and_(number, o.i(0xFF)), o.i(row)))

        word, unit = address(codes, entry[0]), address(units, o.shr(entry[0], 8))
        return [
            o.load_shared(at, behind, count) for at, behind in ((word, 0), (word, row), (unit, 0))
        ]

    def _levels(self, entry: list[Value], rows: list[list[Value]]) -> list[Value]:
        """unit * level of a channel, of the thread's tokens in their order, two in a register."""
        o, (place, masks, *pairs), found = self.tile.o, entry, []
        bit = o.and_(o.shr(place, 16), o.i(15))
        back = o.sub(o.i(WORD), bit)
        in_first, whole = self._both(masks)
        levels = [half for pair in pairs for half in self._both(pair)]
        # 2^(11 - width) as a float, and with it u = code 2^(1 - width) + 2^-width - 1
        exponent = o.shl(o.sub(o.i(26), o.shr(place, 20)), 10)
        factor = o.or_(exponent, o.shl(exponent, 16))
        summand = o.halves_fma(factor, o.i(_TINY), o.i(_LESS_ONE))
        for one, other, scale in zip(*rows, strict=True):
            high, low = o.shl_by(other, back), o.shr_by(one, bit)
            code = o.xor(high, o.and_(o.xor(high, low), in_first))  # low where it is of the first
            code = o.and_(code, whole)
            u = o.halves_fma(o.or_(code, o.i(_ONE)), o.i(_ONE), o.i(_LESS_ONE))
            u = o.halves_fma(u, factor, summand)
            square, level = o.halves_mul(u, u), levels[-1]
            for coefficient in levels[-2::-1]:
                level = o.halves_fma(level, square, coefficient)
            found.append(o.halves_mul(o.halves_mul(u, scale), level))
        return found

    def _both(self, pair: Value) -> list[Value]:
        """Either half of a register in both halves of one."""
        o = self.tile.o
        return [o.bytes_of(pair, pair, o.i(selector)) for selector in (0x1010, 0x3232)]


_TOKENS = (0x5410, 0x7632)  # the lower halves of two registers, the upper ones
