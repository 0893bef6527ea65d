"""Values of affine codes in a warp: integer products of the codes as they are stored.

    sum_t p_t v^_t = sum_t (p_t scale_t) code_t + sum_t p_t lo_t

p scale of a tile is 16-bit integers in two bytes each, as a query is (affine_keys.py). Values lie
token by token and are wanted by channels: blocks of 4 x 4 bytes are turned in registers. Their
planes are left with those below them in the byte, which saves shifts; differences are taken at the
end.
"""

from dataclasses import dataclass

import numpy as np

from jkvq.pallas_kernels.mosaic.lanes import Value
from jkvq.pallas_kernels.mosaic.sides.parts import Part, load_registers, parts_of
from jkvq.pallas_kernels.mosaic.tile import Seen, Tile

# Weights p scale become integers below 2^16: times 1.99976 2^14 over the greatest one's power of 2.
_UP = 0x3FFFE000
_DOWN = int((2 / np.uint32(_UP).view(np.float32)).view(np.uint32)) - (15 << 23) - 0x3F800000
_ONE = 0x3F800000
_TINY = 2.0**-60  # the least that the greatest weight of a tile counts as


@dataclass(frozen=True)
class Weights:
    """Weights p scale of a tile's values, as the second factor of products; their unit."""

    tiles: list[Value]
    unit: Value


def weigh(
    tile: Tile,
    p: list[Value],
    scales: list[Value],
    los: list[Value],
    seen: Seen | None,
    base: Value,
) -> tuple[Weights, Value]:
    """The weights of a tile's tokens, and ``base`` with their p lo added.

    seen: the tokens that take part, where not all do.
    """
    o = tile.o
    if seen is not None:
        real = [seen.has(tile.token(x)) for x in range(tile.each)]
        scales, los = (
            [o.select(is_real, number, o.f(0.0)) for is_real, number in zip(real, all, strict=True)]
            for all in (scales, los)
        )
    weights, top = [], o.f(_TINY)
    for each, scale, lo in zip(p, scales, los, strict=True):
        base = o.ffma(each, lo, base)
        weights.append(o.fmul(each, scale))
        top = o.fmax(top, weights[-1])
    power = o.and_(o.as_int(tile.greatest(top)), o.i(0x7F800000))
    up = o.as_float(o.sub(o.i(_UP + (14 << 23) + _ONE), power))
    unit = o.as_float(o.add(power, o.i(_DOWN)))
    fixed = [o.as_int(o.ffma(weight, up, o.f(2.0**23))) for weight in weights]
    tiles = [
        o.transpose(o.bytes_of(fixed[x], fixed[x + 1], o.i(0x4051))) for x in range(0, tile.each, 2)
    ]
    return Weights([*tiles, *[o.i(0)] * (len(tiles) % 2)], unit), base


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
        self, stored: list[Value], p: list[Value], seen: Seen | None, state: list[Value]
    ) -> list[Value]:
        """The state with a tile added.

        seen: the tokens that take part, where not all do; others may hold anything.
        """
        o, (codes, params) = self.tile.o, stored
        numbers = o.add(params, o.mul(self.tile.r, o.i(2 * self.tile.each)))
        scales = self.tile.numbers(numbers, 0)
        los = self.tile.numbers(numbers, 2 * self.tile.tokens)
        weights, base = weigh(self.tile, p, scales, los, seen, state[-1])
        sums = [total for n in range(len(self.parts)) for total in self._sums(codes, n, weights)]
        added = zip(state[:-1], sums, strict=True)
        return [*(o.ffma(o.to_float(new), weights.unit, old) for old, new in added), base]

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
                    rows.append(load_registers(o, address, behind + part.offset, part.bytes // 32))
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
