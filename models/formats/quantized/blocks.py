"""Scales of blocks, and numbers packed in words."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int


def per_element(
    scale: np.ndarray, shape: tuple[int, ...], block: Sequence[int] | None = None
) -> np.ndarray:
    """Scales of blocks of a matrix, for each of its numbers.

    ``block`` is the shape of a block, of which the last ones may be cut short; None where all are
    of one size: of rows, groups of inputs, or the whole matrix.
    """
    scale = scale.astype(np.float32)
    if scale.ndim < 2:
        scale = scale.reshape(-1, 1)
    for axis, size in enumerate(shape):
        by = block[axis] if block and scale.shape[axis] > 1 else -(-size // scale.shape[axis])
        scale = np.repeat(scale, by, axis=axis).take(np.arange(size), axis=axis)
    return scale


def unpacked(words: Int[np.ndarray, "*n w"], bits: int) -> Int[np.ndarray, "*n v"]:
    """The numbers in 32-bit words, the lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = words.view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return numbers.reshape(*words.shape[:-1], -1).astype(np.int32)
