"""MXFP4: 4-bit floats (e2m1) in blocks of 32 that share a power of two, as gpt-oss has them."""

import ml_dtypes
import numpy as np
from jaxtyping import UInt

from jkvq.models.fields import Fields

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.asarray([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)  # of each code
_BIAS = 127  # of exponents


def mxfp4(config: Fields, read):
    """value[code] 2^(scale - 127); a byte holds two codes, the lower bits first."""
    del config  # it says which matrices were left as they are

    def dequantized(name: str) -> np.ndarray:
        try:
            return read(name)
        except KeyError:
            try:
                blocks, scales = read(f"{name}_blocks"), read(f"{name}_scales")
            except KeyError:
                raise KeyError(name) from None
        # Bfloat16 holds these numbers as they are. One expert at a time is wider.
        out = np.empty((*blocks.shape[:2], blocks.shape[2] * 32), ml_dtypes.bfloat16)
        for expert, own in enumerate(blocks):
            out[expert] = _matrix(own, scales[expert])
        return out.swapaxes(1, 2)  # [expert, in, out], as if it had never been quantized

    return dequantized


def _matrix(blocks: UInt[np.ndarray, "o n 16"], scales: UInt[np.ndarray, "o n"]) -> np.ndarray:
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    exponent = scales.astype(np.int32)[..., None] - _BIAS
    return np.ldexp(_VALUES[codes], exponent).reshape(len(scales), -1)
