"""What a spec stores of a token: the sizes of the arrays that its codecs fill."""

from typing import NamedTuple

import numpy as np

from jkvq.cache.specs.spec import SideSpec
from jkvq.pallas_kernels.formats.codecs import index_dtype
from jkvq.pallas_kernels.formats.packing import packed_words

BLOCK_GROUPS = 4  # different widths, and so norms, that a head with a block allocation may have


class Stored(NamedTuple):
    """What one token and head take in storage."""

    codes: int  # elements of the codes' dtype
    dtype: type  # of the codes
    params: int  # bfloat16 numbers
    centroid: type | None  # of the index of its centroid, one for all heads
    stream: bool = False  # of codes of unequal widths


def stored(side: SideSpec, head_dim: int) -> Stored:
    """What a side's spec keeps of one token and head."""
    if side.codec == "float":
        return Stored(head_dim, {16: np.uint16, 32: np.uint32}[side.bits], 0, None)
    index = index_dtype(side.centroids) if side.centroids else None
    blocks = side.allocation == "blocks"
    if side.codec == "affine":
        params = 2 * head_dim // (side.group or head_dim)
    else:
        params = BLOCK_GROUPS if blocks else 1
    return Stored(packed_words(head_dim, side.bits), np.uint16, params, index, blocks)
