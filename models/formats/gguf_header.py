"""The header of a GGUF file: metadata and where each tensor lies.

The gguf package reads headers too, but takes 10 s for a vocabulary of 150,000 tokens; this takes a
fraction of one. Its tables of types and sizes are used here.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from jkvq.support.errors import UserError

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies and how it is coded."""

    shape: tuple[int, ...]  # outermost first, as numpy has it
    kind: GGMLQuantizationType
    offset: int  # in the file
    bytes: int


@dataclass(frozen=True)
class Header:
    """What stands before the tensor data."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Reads the header and checks that the file is long enough for its tensors."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size  # an empty file cannot be mapped
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
            header = _Reader(str(path), data).header()
    except (struct.error, EOFError, ValueError):
        raise UserError(f"{path} is truncated or damaged; fetch it again") from None
    needed = max((info.offset + info.bytes for info in header.tensors.values()), default=0)
    if path.stat().st_size < needed:
        raise UserError(
            f"{path} is truncated: {path.stat().st_size} of {needed} bytes; fetch it again"
        )
    return header


class _Reader:
    """A cursor over the header of one file."""

    def __init__(self, name: str, data: bytes | mmap.mmap):
        self.name, self.data, self.at = name, data, 0

    def header(self) -> Header:
        if self.data[:4] != b"GGUF":
            raise UserError(f"{self.name} is not a GGUF file; fetch it again")
        self.at = 4
        version = self._unpack("<I")
        if version not in (2, 3):
            raise UserError(f"{self.name} is GGUF version {version}; 2 and 3 are supported")
        tensor_count, field_count = self._unpack("<Q"), self._unpack("<Q")
        metadata = dict(self._field() for _ in range(field_count))
        infos = [self._tensor() for _ in range(tensor_count)]
        align = metadata.get("general.alignment", 32)
        start = -(-self.at // align) * align
        tensors = {
            name: TensorInfo(shape, kind, start + offset, size)
            for name, shape, kind, offset, size in infos
        }
        return Header(metadata, tensors)

    def _unpack(self, layout: str):
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def _bytes(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise EOFError
        self.at += count
        return self.data[self.at - count : self.at]

    def _string(self) -> str:
        return self._bytes(self._unpack("<Q")).decode("utf-8", errors="replace")

    def _field(self) -> tuple[str, Any]:
        return self._string(), self._value(GGUFValueType(self._unpack("<I")))

    def _value(self, kind: GGUFValueType):
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._scalars(kind, 1)[0]
        item, count = GGUFValueType(self._unpack("<I")), self._unpack("<Q")
        if item in _SCALARS:
            return self._scalars(item, count)
        return [self._value(item) for _ in range(count)]

    def _scalars(self, kind: GGUFValueType, count: int) -> list:
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._bytes(count * dtype.itemsize), dtype).tolist()

    def _tensor(self):
        name = self._string()
        shape = tuple(self._unpack("<Q") for _ in range(self._unpack("<I")))[::-1]
        kind, offset = GGMLQuantizationType(self._unpack("<I")), self._unpack("<Q")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        return name, shape, kind, offset, int(np.prod(shape)) // block * block_bytes
