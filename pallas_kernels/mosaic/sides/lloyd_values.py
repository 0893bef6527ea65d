"""Values of Lloyd's codes in a warp: integer products of levels that are looked up (levels.py).

    sum_t p_t v^_t = slope sum_t (p_t unit_t) (low_t + worth high_t) + offset sum_t p_t unit_t

Values lie token by token and are wanted by channels: the nibbles of four tokens are put side by
side first, so that one look-up gives the bytes of four tokens of a channel.
"""

from jkvq.pallas_kernels.mosaic.lanes import Value
from jkvq.pallas_kernels.mosaic.sides.affine_values import Weights, weigh
from jkvq.pallas_kernels.mosaic.sides.levels import Levels, Nibbles
from jkvq.pallas_kernels.mosaic.sides.parts import load_registers
from jkvq.pallas_kernels.mosaic.tile import Seen, Tile

_LOWER = 0x0F0F0F0F  # nibbles


class LloydValues:
    """Sums of values by their weights: the output of a sequence, tile by tile."""

    far = 30.0  # powers of 2 that p may grow to: float32 has room for that

    def __init__(self, tile: Tile, bits: int, channels: int):
        o = tile.o
        self.tile, self.row = tile, channels * bits // 8
        self.levels = Levels(bits, channels)
        self.nibbles = Nibbles(o, bits, channels, o.shr(tile.r, 2))
        self.bytes = self.nibbles.low.bytes // 8  # of a thread, in a token's row
        places = [o.mul(eighth, o.i(self.bytes)) for eighth in (tile.r, o.and_(tile.r, o.i(3)))]
        groups = [o.add(o.shl(tile.c, 1), o.i(k)) for k in range(2)]
        rows = [tile.rows_of(group, self.row) for group in groups]
        self._rows = [
            [[o.add(at, place) for at in each] for each in rows]
            for place in places[: 1 + (bits == 3)]
        ]

    @property
    def _items(self) -> list[tuple[int, int]]:
        """Byte and plane of the thread's channels."""
        planes = range(self.nibbles.low.planes)
        return [(byte, plane) for byte in range(self.bytes) for plane in planes]

    @property
    def zero(self) -> list[Value]:
        """The output before the first tile, and the sum of p unit offset."""
        return [self.tile.o.f(0.0)] * (len(self._items) + 1)

    def add(
        self, stored: list[Value], p: list[Value], seen: Seen | None, state: list[Value]
    ) -> list[Value]:
        """The state with a tile added.

        seen: the tokens that take part, where not all do; others may hold anything.
        """
        tile, o, (codes, params) = self.tile, self.tile.o, stored
        units = tile.numbers(o.add(params, o.mul(tile.r, o.i(2 * tile.each))), 0, "f16")
        los = [o.fmul(unit, o.f(self.levels.offset)) for unit in units]
        weights, base = weigh(tile, p, units, los, seen, state[-1])
        added = zip(state[:-1], self._sums(codes, weights), strict=True)
        return [*(o.ffma(new, weights.unit, old) for old, new in added), base]

    def _sums(self, codes: Value, weights: Weights) -> list[Value]:
        """Of low + worth high: of each item, over the tile's tokens."""
        tile, o, count = self.tile, self.tile.o, len(self._items)
        totals = [[[o.i(0)] * 4 for _ in range(0, count, 2)] for _ in range(2)]
        for i in range(0, len(weights.tiles), 2):
            halves = [
                self._looked_up(codes, 2 * j) if 2 * j < tile.each else [[o.i(0)] * 2] * count
                for j in (i, i + 1)
            ]
            for table, total in enumerate(totals):
                for k in range(count // 2):
                    a = [half[2 * k + n][table] for half in halves for n in range(2)]
                    own = weights.tiles[i : i + 2]
                    total[k] = o.multiply_bytes(total[k], a, own, "u8.u8")
        low, high = (
            [o.to_float(o.add(o.shl(four[i], 8), four[i + 1])) for four in total for i in (0, 2)]
            for total in totals
        )
        worth = o.f(self.levels.worth)
        return [o.ffma(more, worth, less) for less, more in zip(low, high, strict=True)]

    def _looked_up(self, codes: Value, x: int) -> list[list[Value]]:
        """By items: low and high bytes of four tokens, x and x + 1 of two groups."""
        parts = [self._registers(codes, part, x) for part in range(len(self._rows))]
        highs = parts[1] if len(parts) > 1 else [[None] * 4] * len(parts[0])
        found = {}
        for register, (lows, others) in enumerate(zip(parts[0], highs, strict=True)):
            tokens = [self.nibbles.of(*both) for both in zip(lows, others, strict=True)]
            for planes, of_tokens in zip(
                self.nibbles.planes, zip(*tokens, strict=True), strict=True
            ):
                for upper, plane in enumerate(planes):
                    for byte, four in enumerate(self._side_by_side(of_tokens, upper)):
                        item = 4 * register + byte, plane
                        found[item] = self.levels.look_up(self.tile.o, four)
        return [found[item] for item in self._items]

    def _registers(self, codes: Value, part: int, x: int) -> list[tuple[Value, ...]]:
        """A thread's registers of a part, each of four tokens."""
        tile, o, found = self.tile, self.tile.o, []
        for group in range(2):
            for token in (x, x + 1):
                turn, behind = tile.place(token, self.row)
                address = o.add(codes, self._rows[part][group][turn])
                behind += part * self.nibbles.low.bytes
                if self.bytes == 2:
                    found.append([o.load_shared_half(address, behind)])
                else:
                    found.append(load_registers(o, address, behind, self.bytes // 4))
        return list(zip(*found, strict=True))

    def _side_by_side(self, tokens: tuple[Value, ...], upper: int) -> list[Value]:
        """The lower or upper nibbles of four tokens, for each byte of their registers."""
        o, pairs = self.tile.o, []
        for one, other in (tokens[:2], tokens[2:]):
            low, high = (o.shr(one, 4), other) if upper else (one, o.shl(other, 4))
            pairs.append(o.or_(o.and_(low, o.i(_LOWER)), o.and_(high, o.i(~_LOWER))))
        both = [o.bytes_of(*pairs, o.i(some)) for some in (0x5140, 0x7362)[: (self.bytes + 1) // 2]]
        return [o.shr(each, 16 * half) for each in both for half in range(2)]

    def outputs(self, state: list[Value], inverse: Value) -> list[list[tuple[int, list[Value]]]]:
        """The channels, behind ``word_of``, and the outputs of neighbouring ones."""
        o = self.tile.o
        *state, base = state
        base, by_place = self.tile.total(base), {}
        for (byte, plane), value in zip(self._items, state, strict=True):
            place = self.nibbles.low.behind(byte, plane)
            whole = o.ffma(value, o.f(self.levels.slope), base)
            by_place.setdefault(place, []).append(o.fmul(whole, inverse))
        return [sorted(by_place.items())]

    def word_of(self, number: int) -> Value:
        """The first word of a thread's columns."""
        del number
        return self.tile.o.mul(self.tile.r, self.tile.o.i(self.bytes // 2))
