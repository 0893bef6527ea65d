"""8-bit floats with scales of blocks, as DeepSeek and GLM publish them."""

import numpy as np

from jkvq.models.fields import Fields
from jkvq.models.formats.quantized.blocks import per_element
from jkvq.support.errors import UserError


def float8(config: Fields, read):
    """weight * weight_scale_inv, the latter one number for each block of ``weight_block_size``."""
    if config.get("fmt", "e4m3") != "e4m3":
        raise UserError(f"fp8 of format {config['fmt']!r} is not supported; supported: 'e4m3'")
    size = config.get("weight_block_size")

    def dequantized(name: str) -> np.ndarray:
        weight = read(name)
        if weight.dtype.itemsize > 1:
            return weight
        for suffix in ("_scale_inv", "_scale"):
            try:
                scale = read(f"{name}{suffix}")
            except KeyError:
                continue
            return weight.astype(np.float32) * per_element(scale, weight.shape, size)
        raise UserError(f"'{name}' is of 8-bit floats, and there is no '{name}_scale_inv'")

    return dequantized
