"""AWQ and GPTQ: 4-bit integers in words of 32 bits, with zeros and scales of groups of inputs."""

import numpy as np

from jkvq.models.fields import Fields
from jkvq.models.formats.quantized.blocks import unpacked
from jkvq.support.errors import UserError

# Where AWQ puts eight numbers that stand side by side: number i of a word is column _AWQ_COLUMNS[i]
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(config: Fields, read):
    """W[o, i] = (q - zero) scale, of the group of input i; words hold outputs."""
    _require(config, "awq", {"bits": (4,), "version": ("gemm", "GEMM", None)})
    order = np.argsort(_AWQ_COLUMNS)

    def columns(words: np.ndarray) -> np.ndarray:
        numbers = unpacked(words, 4)
        return numbers.reshape(len(numbers), -1, 8)[..., order].reshape(numbers.shape)

    def matrix(base: str) -> np.ndarray:
        q, zero = columns(read(f"{base}.qweight")), columns(read(f"{base}.qzeros"))
        group = len(q) // len(zero)
        return _scaled(q, zero, read(f"{base}.scales"), np.arange(len(q)) // group)

    return _dequantizing(read, matrix)


def gptq(config: Fields, read):
    """W[o, i] = (q - zero - 1) scale, of the group g_idx of input i; words hold inputs."""
    _require(config, "gptq", {"bits": (4, 8), "checkpoint_format": ("gptq", "gptq_v2", None)})
    bits, below = config["bits"], int(config.get("checkpoint_format") != "gptq_v2")

    def matrix(base: str) -> np.ndarray:
        q = unpacked(np.ascontiguousarray(read(f"{base}.qweight").T), bits).T
        zero = unpacked(read(f"{base}.qzeros"), bits)
        try:
            group = read(f"{base}.g_idx")
        except KeyError:
            group = np.arange(len(q)) // (len(q) // len(zero))
        return _scaled(q, zero + below, read(f"{base}.scales"), group)

    return _dequantizing(read, matrix)


def _scaled(q, zero, scale, group) -> np.ndarray:
    """The matrix [out, in] of numbers [in, out] with zeros and scales of groups of inputs."""
    return ((q - zero[group]) * scale.astype(np.float32)[group]).T.astype(np.float32)


def _dequantizing(read, matrix):
    def dequantized(name: str) -> np.ndarray:
        try:
            return read(name)
        except KeyError:
            base, _, kind = name.rpartition(".")
            if kind != "weight":
                raise
        try:
            return matrix(base)
        except KeyError:
            raise KeyError(name) from None

    return dequantized


def _require(config: Fields, method: str, allowed: dict[str, tuple]) -> None:
    for name, values in allowed.items():
        if config.get(name) not in values:
            listed = " and ".join(str(value) for value in values if value is not None)
            raise UserError(
                f"{method} with {name}={config.get(name)!r} is not supported; supported: {listed}"
            )
