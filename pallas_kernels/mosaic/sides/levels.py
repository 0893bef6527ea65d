"""Levels of small codes, looked up in registers.

One instruction picks four bytes out of eight by four nibbles: codes of up to 3 bits that lie in
nibbles become bytes of a table. A level has two of them, ``low`` and ``high``:

    level[code] = offset + slope (low + worth high)

A code of 4 bits picks from two tables. A nibble of 8 or more gives the sign of a byte, which is 0
for bytes below 128: so each table gives nothing where the code is the other's.
"""

from dataclasses import dataclass

import numpy as np

from jkvq.pallas_kernels.formats.lloyd import group_levels
from jkvq.pallas_kernels.mosaic.lanes import Value
from jkvq.pallas_kernels.mosaic.sides.parts import Part, parts_of

BITS = (2, 3, 4)  # of codes that this serves


@dataclass(frozen=True)
class Levels:
    """The Lloyd levels of codes of one width, for groups of so many channels."""

    bits: int
    channels: int

    @property
    def _byte(self) -> int:
        """Bits that a byte of a table has."""
        return 7 if self.bits == 4 else 8

    @property
    def worth(self) -> float:
        """Of the high byte."""
        return float(1 << self._byte)

    @property
    def offset(self) -> float:
        return float(group_levels(self.bits, self.channels)[0])

    @property
    def slope(self) -> float:
        levels = group_levels(self.bits, self.channels)
        return float((levels[-1] - levels[0]) / ((1 << 2 * self._byte) - 1))

    def _tables(self) -> list[list[int]]:
        """Registers of low bytes, and of high ones."""
        levels = group_levels(self.bits, self.channels)
        whole = np.rint((levels - self.offset) / self.slope).astype(np.int64)
        size = max(8, len(whole))
        both = whole % (1 << self._byte), whole >> self._byte
        return [np.resize(table, size).astype(np.uint8).view(np.uint32).tolist() for table in both]

    def look_up(self, o, nibbles: Value) -> list[Value]:
        """The low and the high bytes of the levels of four codes in the lower 16 bits."""
        return [self._pick(o, nibbles, [o.i(word) for word in table]) for table in self._tables()]

    def _pick(self, o, nibbles: Value, table: list[Value]) -> Value:
        found = o.bytes_of(table[0], table[1], nibbles)
        if self.bits < 4:
            return found
        return o.or_(found, o.bytes_of(table[2], table[3], o.xor(nibbles, o.i(0x8888))))


class Nibbles:
    """Codes of 2, 3 or 4 bits as nibbles of registers.

    turn: which of the high part's planes a thread takes, of 3 bits: the third bits of word j lie
        in word j of the first half of the words, or j - half, in every other plane.
    """

    def __init__(self, o, bits: int, channels: int, turn: Value):
        self.o, self.bits, self.turn = o, bits, turn
        self.low: Part = parts_of(bits, channels)[0]
        if bits == 3:
            self._up = o.sub(o.i(2), turn)

    @property
    def planes(self) -> list[tuple[int, int]]:
        """The planes whose codes are in the lower and upper nibbles, of each register."""
        return [(0, 1)] if self.bits == 4 else [(0, 2), (1, 3)]

    def of(self, low: Value, high: Value | None) -> list[Value]:
        """Registers of nibbles, of a register of each part."""
        o = self.o
        if self.bits == 4:
            return [low]
        found = [o.and_(each, o.i(0x33333333)) for each in (low, o.shr(low, 2))]
        if high is None:
            return found
        third = o.shl_by(high, self._up), o.shr_by(high, self.turn)
        return [
            o.or_(two, o.and_(one, o.i(0x44444444))) for two, one in zip(found, third, strict=True)
        ]
