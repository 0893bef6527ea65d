"""Keys of affine codes in a warp: integer products of the codes as they are stored.

    q . k^ = scale (q . code) + lo sum(q)

q is 16-bit integers in two bytes each, the columns 2 g and 2 g + 1 of query head g: products of
bytes by codes add up exactly in 32 bits, and both columns meet in one thread. Codes come out of
their words four at a time by one mask: the byte of a register with the codes of one *plane*, 8 /
bits planes in all. A query is put into the order in which they come. Keys are rows of the first
factor as they lie in memory.
"""

from dataclasses import dataclass

from jkvq.pallas_kernels.formats.digits import place_of
from jkvq.pallas_kernels.mosaic.lanes import Value
from jkvq.pallas_kernels.mosaic.sides.parts import Part, load_registers, parts_of
from jkvq.pallas_kernels.mosaic.tile import Tile

_QUERY_UNIT = 32512.0  # the greatest 16-bit query: its upper byte is at most 127 when rounded


@dataclass(frozen=True)
class Query:
    """A query in a warp: its bytes by parts and steps; what a unit of them is; its sum."""

    bytes: list[list[Value]]
    unit: Value
    total: Value


def query_of(tile: Tile, values: list[list[list[Value]]], scale: float) -> Query:
    """The query of these channels, four for each step, by parts that all have every channel."""
    o = tile.o
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
        values = [[self._four(load, part, *step) for step in part.steps] for part in self.parts]
        return query_of(self.tile, values, scale)

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
        return load_registers(o, address, behind + part.offset, part.registers)

    def _plane(self, row: list[Value], part: Part, register: int, plane: int) -> Value:
        o = self.tile.o
        if part.bits == 8:
            return row[register]
        mask = o.i(((1 << part.bits) - 1) * 0x01010101)
        return o.and_(o.shr(row[register], part.bits * plane), mask)


def _packed(o, values: list[Value]) -> Value:
    """The low bytes of four registers."""
    low, high = (o.bytes_of(*values[k : k + 2], o.i(0x0040)) for k in (0, 2))
    return o.bytes_of(low, high, o.i(0x5410))
