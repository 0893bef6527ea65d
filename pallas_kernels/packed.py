"""Packed tokens: the arrays in which one side of the cache, keys or values, is stored."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, UInt


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """Codes and what their decoder needs, for tokens in pages or in a row.

    In pages:  codes [L, P, K, p, words], params [L, P, K, n, p], index [L, P, p]
    In a row:  codes [B, T, K, words],    params [B, T, K, n],    index [B, T]

    codes: words of packed codes (packing.py) or of whole floats (words.py).
    params: the words of bfloat16 numbers, n for each token and head; tokens last in pages, so that
        a tile loads whole. None where the codec has none.
    index: of each token's centroid. None where there are no centroids.
    """

    codes: UInt[Array, "..."]
    params: UInt[Array, "..."] | None = None
    index: UInt[Array, "..."] | None = None
