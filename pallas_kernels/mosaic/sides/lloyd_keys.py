"""Keys of Lloyd's codes in a warp: integer products of levels that are looked up (levels.py).

    q . k^ = unit (slope q . (low + worth high) + offset sum(q))

Bytes of levels take the place of affine codes (affine_keys.py).
"""

from jkvq.pallas_kernels.mosaic.lanes import Value
from jkvq.pallas_kernels.mosaic.sides.affine_keys import Query, query_of
from jkvq.pallas_kernels.mosaic.sides.levels import Levels, Nibbles
from jkvq.pallas_kernels.mosaic.sides.parts import load_registers
from jkvq.pallas_kernels.mosaic.tile import Tile


class LloydKeys:
    """Scores of a tile of keys."""

    def __init__(self, tile: Tile, bits: int, channels: int):
        o = tile.o
        self.tile, self.row = tile, channels * bits // 8
        self.levels = Levels(bits, channels)
        self.nibbles = Nibbles(o, bits, channels, o.shr(tile.c, 1))
        quarter = o.i(4 * self.nibbles.low.registers)
        places = [o.mul(tile.c, quarter), o.mul(o.and_(tile.c, o.i(1)), quarter)]
        self._rows = [
            [o.add(row, place) for row in tile.rows_of(tile.r, self.row)]
            for place in places[: 1 + (bits == 3)]
        ]

    def query(self, load, scale: float) -> Query:
        """``load`` gives the query's channel, by its number, of query head thread // 8."""
        o, low = self.tile.o, self.nibbles.low
        first = o.mul(self.tile.c, o.i(2 * low.registers))

        def four(register: int, planes: tuple[int, int], half: int) -> list[Value]:
            places = [(2 * half + i // 2, planes[i % 2]) for i in range(4)]
            return [
                load(o.add(first, o.i(2 * register + byte // 2 + low.behind(byte, plane))))
                for byte, plane in places
            ]

        steps = [
            four(register, planes, half)
            for register in range(low.registers)
            for planes in self.nibbles.planes
            for half in range(2)
        ]
        return query_of(self.tile, [steps], scale)

    def scores(self, stored: list[Value], query: Query, less: Value) -> list[Value]:
        """To base 2, plus ``less``, of each of the thread's tokens; of query head c.

        ``stored`` is where the tile's codes and units begin.
        """
        tile, o, (codes, params) = self.tile, self.tile.o, stored
        units = tile.numbers(o.add(params, o.mul(tile.r, o.i(2 * tile.each))), 0, "f16")
        slope = o.fmul(query.unit, o.f(self.levels.slope))
        base = o.fmul(query.total, o.f(self.levels.offset))
        found = []
        for x in range(0, tile.each, 2):
            for unit, dot in zip(units[x : x + 2], self._dots(codes, x, query), strict=True):
                found.append(o.ffma(unit, o.ffma(dot, slope, base), less))
        return found

    def _dots(self, codes: Value, x: int, query: Query) -> list[Value]:
        """q . (low + worth high) of two tokens."""
        o, own = self.tile.o, query.bytes[0]
        rows = [self._looked_up(codes, x + k) for k in range(2)]
        sums = []
        for table in range(2):
            total = [o.i(0)] * 4
            for k in range(0, len(own), 2):
                a = [row[step][table] for step in (k, k + 1) for row in rows]
                total = o.multiply_bytes(total, a, own[k : k + 2], "u8.s8")
            sums.append([o.to_float(o.add(o.shl(total[i], 8), total[i + 1])) for i in (0, 2)])
        worth = o.f(self.levels.worth)
        return [o.ffma(high, worth, low) for low, high in zip(*sums, strict=True)]

    def _looked_up(self, codes: Value, x: int) -> list[list[Value]]:
        """Low and high bytes of the levels of a thread's quarter of a token, by steps."""
        o, low = self.tile.o, self.nibbles.low
        turn, behind = self.tile.place(x, self.row)
        registers = [
            load_registers(o, o.add(codes, rows[turn]), behind + part * low.bytes, low.registers)
            for part, rows in enumerate(self._rows)
        ]
        highs = registers[1] if len(registers) > 1 else [None] * low.registers
        return [
            self.levels.look_up(o, o.shr(nibbles, 16 * half))
            for one, other in zip(registers[0], highs, strict=True)
            for nibbles in self.nibbles.of(one, other)
            for half in range(2)
        ]
