"""Which tokens of a tile of pages each thread of a warp has.

A warp reads a tile of 16, 32 or 64 tokens of one KV head. Thread number 4 r + c has the tokens
X r + (x ^ f), x = 0 to X - 1, together with the three others of its r: of their keys, the c-th
quarter of each row; of their scores, those of query head c. The permutation f, which depends on r,
makes threads that load at the same time load from different banks of shared memory.
"""

from dataclasses import dataclass
from typing import Any

from jkvq.pallas_kernels.mosaic.lanes import Value

HEADS = 4  # query heads of a warp: each has two columns of a matrix product


@dataclass(frozen=True)
class Seen:
    """The tokens of a tile that take part: from ``first`` on, if it is given, and before ``past``.

    By their numbers in the tile, which the bounds may lie outside of.
    """

    o: Any
    past: Value
    first: Value | None = None

    def has(self, token: Value) -> Value:
        below = self.o.lt(token, self.past)
        if self.first is None:
            return below
        return self.o.and_(below, self.o.lt(self.o.sub(self.first, self.o.i(1)), token))


class Tile:
    """A warp's tile; ``row`` is the bytes of a token."""

    def __init__(self, o, lane: Value, tokens: int, row: int):
        self.o, self.lane, self.tokens, self.row = o, lane, tokens, row
        self.r, self.c = o.shr(lane, 2), o.and_(lane, o.i(3))
        self.each = tokens // 8  # tokens of a thread: X
        self.narrow = row >= 64 or self.each < 4  # whether f is 0 or 1, else up to 3
        self.turns = 2 if self.narrow else 4
        self.f = self._turn(self.r)
        if self.narrow:
            low, high, even = o.i(0x1044), o.i(0x3244), o.eq(self.f, o.i(0))
            self._halves = [o.select(even, low, high), o.select(even, high, low)]
        else:  # halves 0 ^ f and 1 ^ f, or 2 ^ f and 3 ^ f, of two registers
            self._halves = [
                o.add(
                    o.mul(o.xor(o.i(2 * k), self.f), o.i(0x22)),
                    o.add(o.mul(o.xor(o.i(2 * k + 1), self.f), o.i(0x2200)), o.i(0x1010)),
                )
                for k in range(2)
            ]

    def _turn(self, r: Value) -> Value:
        o = self.o
        if self.narrow:
            return o.and_(o.xor(r, o.shr(r, 1)), o.i(1))
        return o.xor(o.and_(r, o.i(3)), o.shr(r, 2))

    def token(self, x: int) -> Value:
        """The number of the thread's x-th token."""
        return self.token_of(self.r, x)

    def token_of(self, group: Value, x: int) -> Value:
        """The number of the x-th token that the threads with r = group have."""
        o = self.o
        return o.add(o.mul(group, o.i(self.each)), o.xor(o.i(x), self._turn(group)))

    def rows_of(self, group: Value, row: int) -> list[Value]:
        """Where the rows of a group of X tokens begin that ``offset_of`` counts from."""
        o, turn = self.o, self._turn(group)
        first = o.mul(group, o.i(self.each))
        return [o.mul(o.add(first, o.xor(o.i(k), turn)), o.i(row)) for k in range(self.turns)]

    def place(self, x: int, row: int) -> tuple[int, int]:
        """Which of ``rows_of`` the x-th token is counted from, and how many bytes behind it."""
        return x % self.turns, x // self.turns * self.turns * row

    def numbers(self, address: Value, offset: int, kind: str = "bf16") -> list[Value]:
        """A 16-bit float of each of the thread's tokens, which lie in a row."""
        o, count = self.o, self.each // 2
        words = o.load_shared(address, offset, count)
        if self.narrow:
            half = self._halves
            upper = [o.bytes_of(words[x // 2], o.i(0), half[x % 2]) for x in range(self.each)]
        else:
            pairs = [
                o.bytes_of(words[2 * k], words[2 * k + 1], half)
                for k in range(count // 2)
                for half in self._halves
            ]
            upper = [half for pair in pairs for half in (o.shl(pair, 16), pair)]
        if kind == "f16":
            return [o.from_short(o.shr(each, 16), kind) for each in upper]
        return [o.as_float(o.and_(each, o.i(0xFFFF0000))) for each in upper]

    def turned(self, numbers: list[Value]) -> list[Value]:
        """Numbers of the thread's tokens in their order in the tile, as ``token`` has them."""
        o = self.o
        for bit in range(1 if self.narrow else 2):
            other = o.eq(o.and_(o.shr(self.f, bit), o.i(1)), o.i(1))
            numbers = [
                o.select(other, numbers[x ^ (1 << bit)], numbers[x]) for x in range(len(numbers))
            ]
        return numbers

    def greatest(self, value: Value) -> Value:
        """Over the tokens of all threads, for each query head."""
        return self._over_rows(value, self.o.fmax)

    def total(self, value: Value) -> Value:
        """Over the tokens of all threads, for each query head."""
        return self._over_rows(value, self.o.fadd)

    def _over_rows(self, value: Value, join) -> Value:
        for distance in (4, 8, 16):
            value = join(value, self.o.swap(value, distance))
        return value
