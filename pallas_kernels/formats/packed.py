"""Packed tokens: the arrays in which one side of the cache, keys or values, is stored."""

from dataclasses import dataclass, field

import jax
from jaxtyping import Array, Int, UInt

LayerIndex = int | Int[Array, ""]  # which layer, known now or at run time


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """Codes and what is needed to decode them, of tokens in pages or of a chunk in a row.

    In pages:  codes [L, P, K, p, words], params [L, P, K, n, p], index [L, P, p]
    In a row:  codes [B, T, K, words],    params [B, T, K, n],    index [B, T]

    codes: words of packed codes (packing.py) or of whole floats (words.py).
    stream: whether codes have unequal widths: tokens come last in pages then, [L, P, K, words, p],
        so that what differs by channel is the same along a tile's rows.
    params: the words of 16-bit floats, n for each token and head; tokens last in pages, so that
        a tile loads whole. None where the codec has none.
    index: of each token's centroid. None where there are no centroids.
    """

    codes: UInt[Array, "..."]
    params: UInt[Array, "..."] | None = None
    index: UInt[Array, "..."] | None = None
    stream: bool = field(default=False, metadata={"static": True})

    @property
    def kv_heads(self) -> int:
        return self.codes.shape[2]

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return self.codes.shape[4 if self.stream else 3]
