"""compressed-tensors: integers packed in words, and 8-bit floats or integers, with scales."""

from collections.abc import Mapping

import numpy as np

from jkvq.models.fields import Fields
from jkvq.models.formats.quantized.blocks import per_element, unpacked
from jkvq.support.errors import UserError

_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")


def compressed(config: Fields, read):
    """W = (q - zero) scale; scales are of all of a matrix, of rows, or of groups of inputs."""
    bits, block = _weights(config)

    def packed(base: str) -> np.ndarray:
        words, shape = read(f"{base}.weight_packed"), tuple(read(f"{base}.weight_shape").tolist())
        q = unpacked(words, bits)[:, : shape[1]] - (1 << bits - 1)
        scale = read(f"{base}.weight_scale")
        try:
            zero = read(f"{base}.weight_zero_point")
        except KeyError:
            zero = np.zeros((1, 1), np.int32)
        else:  # packed along outputs
            zero = unpacked(np.ascontiguousarray(zero.T), bits).T[: shape[0]] - (1 << bits - 1)
        try:
            group = read(f"{base}.weight_g_idx")
        except KeyError:
            group = np.arange(shape[1]) // -(-shape[1] // scale.shape[1])
        zero = np.broadcast_to(zero, scale.shape)
        return (q - zero[:, group]) * scale.astype(np.float32)[:, group]

    def dequantized(name: str) -> np.ndarray:
        base, _, kind = name.rpartition(".")
        try:
            weight = read(name)
        except KeyError:
            if kind != "weight":
                raise
            try:
                return packed(base)
            except KeyError:
                raise KeyError(name) from None
        if weight.dtype.itemsize > 1:
            return weight
        try:
            zero = per_element(read(f"{base}.weight_zero_point"), weight.shape, block)
        except KeyError:
            zero = 0.0
        scale = per_element(read(f"{base}.weight_scale"), weight.shape, block)
        return (weight.astype(np.float32) - zero) * scale

    return dequantized


def _weights(config: Fields) -> tuple[int, list[int] | None]:
    """Bits of weights and the shape of blocks; refuses what is not known."""
    groups = config.get("config_groups")
    ways = [group.get("weights") for group in groups.values()] if groups else []
    formats = {config.get("format"), *(group.get("format") for group in (groups or {}).values())}
    unknown = sorted(formats.difference(_FORMATS, (None,)))
    if unknown or not ways or not all(isinstance(way, Mapping) for way in ways):
        raise UserError(
            f"compressed-tensors of format {', '.join(unknown) or 'unknown'} is not supported; "
            f"supported: {', '.join(_FORMATS)}"
        )
    bits = {way.get("num_bits") for way in ways}
    if len(bits) > 1 or not bits <= {4, 8}:
        raise UserError(
            f"compressed-tensors with weights of {' and '.join(map(str, bits))} bits is not "
            "supported; supported: 4, or 8"
        )
    return bits.pop(), ways[0].get("block_structure")
