"""Affine codes in a warp: integer products of the codes as they are stored.

    q . k^ = scale (q . code) + lo sum(q)       sum_t p_t v^_t = sum_t (p_t scale_t) code_t
                                                                 + sum_t p_t lo_t

q, and p scale of a tile, are 16-bit integers in two bytes each, the columns 2 g and 2 g + 1 of
query head g: products of bytes by codes add up exactly in 32 bits, and both columns meet in one
thread. Codes come out of their words four at a time by one mask: the byte of a register with the
codes of one *plane*, 8 / bits planes in all. A query is put into the order in which they come.

Keys are rows of the first factor as they lie in memory. Values lie token by token too, and are
wanted by channels: blocks of 4 x 4 bytes are turned in registers. Their planes are left with those
below them in the byte, which saves shifts; differences are taken at the end.
"""

from dataclasses import dataclass

import numpy as np

from jkvq.pallas_kernels.formats.digits import place_of
from jkvq.pallas_kernels.formats.packing import part_widths
from jkvq.pallas_kernels.mosaic.lanes import Value
from jkvq.pallas_kernels.mosaic.tile import Tile

_QUERY_UNIT = 32512.0  # the greatest 16-bit query: its upper byte is at most 127 when rounded
# Weights p scale become integers below 2^16: times 1.99976 2^14 over the greatest one's power of 2.
_UP = 0x3FFFE000
_DOWN = int((2 / np.uint32(_UP).view(np.float32)).view(np.uint32)) - (15 << 23) - 0x3F800000
_ONE = 0x3F800000
_TINY = 2.0**-60  # the least that the greatest weight of a tile counts as


@dataclass(frozen=True)
class Part:
    """The low or high bits of all codes of a token, which lie together (packing.py)."""

    bits: int
    channels: int
    offset: int  # bytes before it in a token's row
    worth: int  # of a code's unit: 4 for the third bit

    @property
    def bytes(self) -> int:
        """Of a token."""
        return self.channels * self.bits // 8

    @property
    def words(self) -> int:
        return self.bytes // 2

    @property
    def planes(self) -> int:
        return 8 // self.bits

    def behind(self, byte: int, plane: int) -> int:
        """The channel of a code less the number of its word, by its byte there and plane."""
        return self.words * (byte % 2 * self.planes + plane)

    @property
    def registers(self) -> int:
        """Of a quarter of a row."""
        return self.bytes // 16

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Register and plane of each sixteen channels of a product."""
        return [(t, plane) for t in range(self.registers) for plane in range(self.planes)]


def parts_of(bits: int, channels: int) -> list[Part]:
    """The parts of codes of so many bits."""
    found, offset, shift = [], 0, 0
    for width in part_widths(bits):
        found.append(Part(width, channels, offset, 1 << shift))
        offset, shift = offset + found[-1].bytes, shift + width
    return found


@dataclass(frozen=True)
class Query:
    """A query in a warp: its bytes by parts and steps; what a unit of them is; its sum."""

    bytes: list[list[Value]]
    unit: Value
    total: Value


class AffineKeys:
    """Scores of a tile of keys.

    digits: of the channels' quarters, where columns hold channels of unequal widths (digits.py).
    """

    def __init__(self, tile: Tile, bits: int, channels: int, digits: tuple[int, ...] | None):
        o = tile.o
        self.tile, self.bits, self.channels, self.digits = tile, bits, channels, digits
        self.parts = parts_of(bits, channels)
        rows = tile.rows_of(tile.r, channels * bits // 8)
        self._rows = [
            [o.add(row, o.mul(tile.c, o.i(4 * part.registers))) for row in rows]
            for part in self.parts
        ]

    def query(self, load, scale: float) -> Query:
        """``load`` gives the query's channel, by its number, of query head thread // 8."""
        tile, o = self.tile, self.tile.o
        values = [[self._four(load, part, *step) for step in part.steps] for part in self.parts]
        every = [value for four in values[0] for value in four]
        most, total = o.fabs(every[0]), every[0]
        for value in every[1:]:
            most, total = o.fmax(most, o.fabs(value)), o.fadd(total, value)
        for distance in (1, 2):
            most = o.fmax(most, o.swap(most, distance))
            total = o.fadd(total, o.swap(total, distance))
        most = o.fmax(most, o.f(1e-20))
        inverse = o.fmul(o.rcp(most), o.f(_QUERY_UNIT))
        upper = o.eq(o.and_(tile.r, o.i(1)), o.i(0))  # the column of the upper bytes
        half, shift = (o.select(upper, o.i(n), o.i(0)) for n in (128, 8))

        def byte(value):
            return o.signed_shr(o.add(o.to_int(o.fmul(value, inverse)), half), shift)

        found = [
            [_packed(o, [byte(value) for value in four]) for four in by_step] for by_step in values
        ]
        source = o.shl(tile.c, 3)
        unit = o.fmul(o.take(most, source), o.f(scale / _QUERY_UNIT))
        return Query(found, unit, o.fmul(o.take(total, source), o.f(scale)))

    def _four(self, load, part: Part, register: int, plane: int) -> list[Value]:
        """The query where the codes of a step are."""
        tile, o = self.tile, self.tile.o
        first = o.mul(tile.c, o.i(2 * part.registers))
        return [
            self._column(load, o.add(first, o.i(2 * register + i // 2)), part.behind(i, plane))
            for i in range(4)
        ]

    def _column(self, load, word: Value, behind: int) -> Value:
        """The query in a column, ``behind`` the number of its word."""
        o = self.tile.o
        if self.digits is None:
            return load(o.add(word, o.i(behind)))
        channel, place = place_of(behind, self.digits, self.channels)
        return o.fmul(load(o.add(word, o.i(channel))), o.f(place.factor(self.bits)))

    def scores(self, stored: list[Value], query: Query, less: Value) -> list[Value]:
        """To base 2, plus ``less``, of each of the thread's tokens; of query head c.

        ``stored`` is where the tile's codes and params begin.
        """
        tile, o, (codes, params) = self.tile, self.tile.o, stored
        numbers = o.add(params, o.mul(tile.r, o.i(2 * tile.each)))
        scale = tile.numbers(numbers, 0)
        lo = tile.numbers(numbers, 2 * tile.tokens)
        found = []
        for x in range(0, tile.each, 2):
            dots = self._dots(codes, x, query)
            for token, dot in enumerate(dots, x):
                base = o.ffma(lo[token], query.total, less)
                found.append(o.ffma(o.fmul(scale[token], query.unit), o.to_float(dot), base))
        return found

    def _dots(self, codes: Value, x: int, query: Query) -> list[Value]:
        """Integers q . code of two tokens."""
        o, dots = self.tile.o, [self.tile.o.i(0)] * 2
        for number, part in enumerate(self.parts):
            total = [o.i(0)] * 4
            rows = [self._row(codes, number, x + k) for k in range(2)]
            planes = [[self._plane(row, part, *step) for step in part.steps] for row in rows]
            own = query.bytes[number]
            for k in range(0, len(own), 2):
                a = [planes[0][k], planes[1][k], planes[0][k + 1], planes[1][k + 1]]
                total = o.multiply_bytes(total, a, own[k : k + 2], "u8.s8")
            found = [o.add(o.shl(total[i], 8), total[i + 1]) for i in (0, 2)]
            if part.worth > 1:
                found = [o.mul(dot, o.i(part.worth)) for dot in found]
            dots = [o.add(*both) for both in zip(dots, found, strict=True)]
        return dots

    def _row(self, codes: Value, number: int, x: int) -> list[Value]:
        """A thread's quarter of a token's row."""
        o, part = self.tile.o, self.parts[number]
        turn, behind = self.tile.place(x, self.channels * self.bits // 8)
        address = o.add(codes, self._rows[number][turn])
        return _load(o, address, behind + part.offset, part.registers)

    def _plane(self, row: list[Value], part: Part, register: int, plane: int) -> Value:
        o = self.tile.o
        if part.bits == 8:
            return row[register]
        mask = o.i(((1 << part.bits) - 1) * 0x01010101)
        return o.and_(o.shr(row[register], part.bits * plane), mask)


@dataclass(frozen=True)
class Weights:
    """Weights p scale of a tile's values, as the second factor of products; their unit."""

    tiles: list[Value]
    unit: Value


class AffineValues:
    """Sums of values by their weights: the output of a sequence, tile by tile."""

    far = 30.0  # powers of 2 that p may grow to: float32 has room for that

    def __init__(self, tile: Tile, bits: int, channels: int):
        o = tile.o
        self.tile, self.bits, self.channels = tile, bits, channels
        self.parts = parts_of(bits, channels)
        row = channels * bits // 8
        groups = [o.add(o.shl(tile.c, 1), o.i(k)) for k in range(2)]
        rows = [tile.rows_of(group, row) for group in groups]
        self._rows = [
            [[o.add(at, o.mul(tile.r, o.i(part.bytes // 8))) for at in each] for each in rows]
            for part in self.parts
        ]

    @property
    def zero(self) -> list[Value]:
        """The output before the first tile, and the sum of p lo."""
        o = self.tile.o
        return [o.f(0.0)] * (sum(len(_items(part)) for part in self.parts) + 1)

    def add(
        self, stored: list[Value], p: list[Value], left: Value | None, state: list[Value]
    ) -> list[Value]:
        """The state with a tile added.

        left: tokens that are real, where not all are; others may hold anything.
        """
        o, (codes, params) = self.tile.o, stored
        weights, base = self._weigh(params, p, left, state[-1])
        sums = [total for n in range(len(self.parts)) for total in self._sums(codes, n, weights)]
        added = zip(state[:-1], sums, strict=True)
        return [*(o.ffma(o.to_float(new), weights.unit, old) for old, new in added), base]

    def _weigh(self, params: Value, p: list[Value], left: Value | None, base: Value):
        """The weights of a tile, and the sum of p lo."""
        tile, o = self.tile, self.tile.o
        numbers = o.add(params, o.mul(tile.r, o.i(2 * tile.each)))
        scales = tile.numbers(numbers, 0)
        los = tile.numbers(numbers, 2 * tile.tokens)
        weights, top = [], o.f(_TINY)
        for x in range(tile.each):
            scale, lo = scales[x], los[x]
            if left is not None:
                real = o.lt(tile.token(x), left)
                scale, lo = (o.select(real, number, o.f(0.0)) for number in (scale, lo))
            base = o.ffma(p[x], lo, base)
            weights.append(o.fmul(p[x], scale))
            top = o.fmax(top, weights[-1])
        power = o.and_(o.as_int(tile.greatest(top)), o.i(0x7F800000))
        up = o.as_float(o.sub(o.i(_UP + (14 << 23) + _ONE), power))
        unit = o.as_float(o.add(power, o.i(_DOWN)))
        fixed = [o.as_int(o.ffma(weight, up, o.f(2.0**23))) for weight in weights]
        tiles = [
            o.transpose(o.bytes_of(fixed[x], fixed[x + 1], o.i(0x4051)))
            for x in range(0, tile.each, 2)
        ]
        return Weights([*tiles, *[o.i(0)] * (len(tiles) % 2)], unit), base

    def _sums(self, codes: Value, number: int, weights: Weights) -> list[Value]:
        """Integers: of each item of a part, over the tile's tokens."""
        tile, o, part = self.tile, self.tile.o, self.parts[number]
        items = _items(part)
        totals = [[o.i(0)] * 4 for _ in range(0, len(items), 2)]
        for i in range(0, len(weights.tiles), 2):
            halves = [
                self._channels(codes, number, 2 * j) if 2 * j < tile.each else None
                for j in (i, i + 1)
            ]
            own = [
                [o.i(0)] * len(items)
                if half is None
                else [self._nested(half, part, *item) for item in items]
                for half in halves
            ]
            for k, total in enumerate(totals):
                a = [own[0][2 * k], own[0][2 * k + 1], own[1][2 * k], own[1][2 * k + 1]]
                totals[k] = o.multiply_bytes(total, a, weights.tiles[i : i + 2], "u8.u8")
        return [o.add(o.shl(total[i], 8), total[i + 1]) for total in totals for i in (0, 2)]

    def _channels(self, codes: Value, number: int, x: int) -> list[Value]:
        """The bytes of four tokens, x and x + 1 of two groups, by the thread's columns."""
        tile, o, part = self.tile, self.tile.o, self.parts[number]
        rows = []
        for group in range(2):
            for token in (x, x + 1):
                turn, behind = tile.place(token, self.channels * self.bits // 8)
                address = o.add(codes, self._rows[number][group][turn])
                if part.bytes // 8 == 2:
                    rows.append([o.load_shared_half(address, behind + part.offset)])
                else:
                    rows.append(_load(o, address, behind + part.offset, part.bytes // 32))
        if part.bytes // 8 == 2:
            return _transposed(o, [row[0] for row in rows])[:2]
        return [
            column
            for k in range(part.bytes // 32)
            for column in _transposed(o, [r[k] for r in rows])
        ]

    def _nested(self, columns: list[Value], part: Part, byte: int, plane: int) -> Value:
        """The codes of a plane of four tokens, with those of the planes below it."""
        o = self.tile.o
        if plane == part.planes - 1:
            return columns[byte]
        return o.and_(columns[byte], o.i(((1 << part.bits * (plane + 1)) - 1) * 0x01010101))

    def outputs(self, state: list[Value], inverse: Value) -> list[list[tuple[int, list[Value]]]]:
        """By parts: the channels, behind ``word_of``, and the outputs of neighbouring ones."""
        o = self.tile.o
        *state, base = state
        base, first, found = self.tile.total(base), 0, []
        for part in self.parts:
            items = _items(part)
            own = dict(zip(items, state[first : first + len(items)], strict=True))
            first += len(items)
            by_place: dict[int, list[Value]] = {}
            for byte, plane in items:
                value = own[byte, plane]
                if plane:
                    value = o.fsub(value, own[byte, plane - 1])
                value = o.fmul(value, o.f(part.worth * 2.0 ** (-part.bits * plane)))
                if part.worth == 1:
                    value = o.fadd(value, base)
                place = part.behind(byte, plane)
                by_place.setdefault(place, []).append(o.fmul(value, inverse))
            found.append(sorted(by_place.items()))
        return found

    def word_of(self, number: int) -> Value:
        """The first word of a thread's columns in a part."""
        return self.tile.o.mul(self.tile.r, self.tile.o.i(self.parts[number].bytes // 16))


def _items(part: Part) -> list[tuple[int, int]]:
    """Byte and plane of the channels of a thread: an even number."""
    return [(byte, plane) for byte in range(part.bytes // 8) for plane in range(part.planes)]


def _load(o, address: Value, offset: int, registers: int) -> list[Value]:
    """Registers in a row, by as few loads as there can be."""
    at_once = min(4, registers)
    return [
        value
        for k in range(0, registers, at_once)
        for value in o.load_shared(address, offset + 4 * k, at_once)
    ]


def _packed(o, values: list[Value]) -> Value:
    """The low bytes of four registers."""
    low, high = (o.bytes_of(*values[k : k + 2], o.i(0x0040)) for k in (0, 2))
    return o.bytes_of(low, high, o.i(0x5410))


def _transposed(o, rows: list[Value]) -> list[Value]:
    """A block of 4 x 4 bytes."""
    low, more = (o.bytes_of(rows[k], rows[k + 1], o.i(0x5140)) for k in (0, 2))
    high, rest = (o.bytes_of(rows[k], rows[k + 1], o.i(0x7362)) for k in (0, 2))
    return [
        o.bytes_of(low, more, o.i(0x5410)),
        o.bytes_of(low, more, o.i(0x7632)),
        o.bytes_of(high, rest, o.i(0x5410)),
        o.bytes_of(high, rest, o.i(0x7632)),
    ]
