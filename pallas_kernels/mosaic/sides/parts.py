"""How the codes of a token lie in its row, and registers of them."""

from dataclasses import dataclass

from jkvq.pallas_kernels.formats.packing import part_widths
from jkvq.pallas_kernels.mosaic.lanes import Value


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


def load_registers(o, address: Value, offset: int, registers: int) -> list[Value]:
    """Registers in a row, by as few loads as there can be."""
    at_once = min(4, registers)
    return [
        value
        for k in range(0, registers, at_once)
        for value in o.load_shared(address, offset + 4 * k, at_once)
    ]
