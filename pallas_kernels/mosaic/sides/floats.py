"""16-bit floats in a warp: whole pages of them, or the windows of a packed cache.

Products are of 16-bit floats with sums in float32. A query, and the weights p, are sums of two such
floats, a number rounded and what is left of it: the columns 2 g and 2 g + 1 of query head g, as the
two bytes are in affine.py. Keys are rows of the first factor as they lie in memory; values, which
are wanted by channels, are turned in registers, two tokens at a time.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from jkvq.pallas_kernels.mosaic.lanes import Value
from jkvq.pallas_kernels.mosaic.tile import Seen, Tile

PIECE = 8  # channels that a thread loads at once


def kind_of(floats: type) -> str:
    """As instructions call it."""
    return {jnp.dtype(jnp.bfloat16): "bf16", jnp.dtype(jnp.float16): "f16"}[jnp.dtype(floats)]


@dataclass(frozen=True)
class FloatQuery:
    """A query in a warp, by steps of sixteen channels; the scale of its scores."""

    steps: list[list[Value]]
    scale: float


def _two(o, value: Value, kind: str) -> tuple[Value, Value]:
    """A float as the sum of two short ones."""
    high = o.short(value, kind)
    return high, o.short(o.fsub(value, o.from_short(high, kind)), kind)


def channels_of(tile: Tile, channels: int) -> list[list[Value]]:
    """A thread's channels, four for each step, where rows are loaded in pieces."""
    o = tile.o
    first = o.mul(tile.c, o.i(PIECE))
    return [
        [o.add(first, o.i(at + k + i)) for i in range(4)]
        for at in range(0, channels, 4 * PIECE)
        for k in (0, 4)
    ]


def float_query(tile: Tile, values: list[list[Value]], kind: str, scale: float) -> FloatQuery:
    """The query of these channels, of query head thread // 8, four for each step."""
    o = tile.o
    upper = o.eq(o.and_(tile.r, o.i(1)), o.i(0))

    def pair(both: list[Value]) -> Value:
        halves = [o.select(upper, *_two(o, value, kind)) for value in both]
        return o.or_(halves[0], o.shl(halves[1], 16))

    return FloatQuery([[pair(four[:2]), pair(four[2:])] for four in values], scale)


class FloatKeys:
    """Scores of a tile of keys."""

    def __init__(self, tile: Tile, kind: str, channels: int):
        o = tile.o
        self.tile, self.kind, self.channels = tile, kind, channels
        rows = tile.rows_of(tile.r, 2 * channels)
        self._rows = [o.add(row, o.mul(tile.c, o.i(2 * PIECE))) for row in rows]

    def query(self, load, scale: float) -> FloatQuery:
        """``load`` gives the query's channel, by its number, of query head thread // 8."""
        fours = channels_of(self.tile, self.channels)
        values = [[load(channel) for channel in four] for four in fours]
        return float_query(self.tile, values, self.kind, scale)

    def scores(self, stored: list[Value], query: FloatQuery, less: Value) -> list[Value]:
        """To base 2, plus ``less``, of each of the thread's tokens; of query head c."""
        o, (codes,), found = self.tile.o, stored, []
        for x in range(0, self.tile.each, 2):
            rows = [self._row(codes, x + k) for k in range(2)]
            total = [o.f(0.0)] * 4
            for step, own in enumerate(query.steps):
                a = [row[2 * step + half] for half in range(2) for row in rows]
                total = o.multiply_floats(total, a, own, self.kind)
            for k in (0, 2):
                dot = o.fadd(total[k], total[k + 1])
                found.append(o.ffma(dot, o.f(query.scale), less))
        return found

    def _row(self, codes: Value, x: int) -> list[Value]:
        """A thread's pieces of a token's row."""
        o = self.tile.o
        turn, behind = self.tile.place(x, 2 * self.channels)
        address = o.add(codes, self._rows[turn])
        return [
            value
            for at in range(0, 2 * self.channels, 8 * PIECE)
            for value in o.load_shared(address, behind + at, 4)
        ]


class FloatValues:
    """Sums of values by their weights: the output of a sequence, tile by tile."""

    def __init__(self, tile: Tile, kind: str, channels: int):
        o = tile.o
        self.tile, self.kind, self.channels = tile, kind, channels
        self._groups = [o.add(o.shl(tile.c, 1), o.i(k)) for k in range(2)]
        self._rows = [
            [o.add(at, o.mul(tile.r, o.i(2 * PIECE))) for at in tile.rows_of(group, 2 * channels)]
            for group in self._groups
        ]

    @property
    def zero(self) -> list[Value]:
        """The output before the first tile: of each channel a number for either column."""
        return [self.tile.o.f(0.0)] * (self.channels // 4)

    @property
    def far(self) -> float:
        """Powers of 2 that p may grow to."""
        return 30.0 if self.kind == "bf16" else 15.0

    def add(
        self, stored: list[Value], p: list[Value], seen: Seen | None, state: list[Value]
    ) -> list[Value]:
        """The state with a tile added.

        seen: the tokens that take part, where not all do; others may hold anything.
        """
        tile, o, (codes,) = self.tile, self.tile.o, stored
        factors = []
        for each in p:
            high, low = _two(o, each, self.kind)
            factors.append(o.transpose(o.or_(high, o.shl(low, 16))))
        state = list(state)
        for x in range(0, tile.each, 2):
            rows = [self._pairs(codes, x + k, seen) for k in range(2)]
            for item in range(self.channels // 16):
                a = [row[2 * item + half] for row in rows for half in range(2)]
                at = slice(4 * item, 4 * item + 4)
                state[at] = o.multiply_floats(state[at], a, factors[x : x + 2], self.kind)
        return state

    def _pairs(self, codes: Value, x: int, seen: Seen | None) -> list[Value]:
        """Of each of the thread's channels, the values of two tokens: the x-th of two groups."""
        tile, o = self.tile, self.tile.o
        turn, behind = tile.place(x, 2 * self.channels)
        rows = []
        for group, at in zip(self._groups, self._rows, strict=True):
            address = o.add(codes, at[turn])
            row = [
                value
                for piece in range(0, 2 * self.channels, 16 * PIECE)
                for value in o.load_shared(address, behind + piece, 4)
            ]
            if seen is not None:
                real = seen.has(tile.token_of(group, x))
                row = [o.select(real, value, o.i(0)) for value in row]
            rows.append(row)
        return [
            o.bytes_of(one, other, o.i(half))
            for one, other in zip(*rows, strict=True)
            for half in (0x5410, 0x7632)
        ]

    def outputs(self, state: list[Value], inverse: Value) -> list[list[tuple[int, list[Value]]]]:
        """As AffineValues has them: one part."""
        o = self.tile.o
        sums = [o.fmul(o.fadd(state[k], state[k + 1]), inverse) for k in range(0, len(state), 2)]
        pieces = range(0, self.channels // 8, PIECE)
        return [[(8 * at, sums[at : at + PIECE]) for at in pieces]]

    def word_of(self, number: int) -> Value:
        """The first of a thread's channels."""
        del number
        return self.tile.o.mul(self.tile.r, self.tile.o.i(PIECE))
