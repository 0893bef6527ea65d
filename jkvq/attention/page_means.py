"""What the mean that keys are stored without adds to their scores: one number for each page.

A key is stored as k - mean, and its mean stands in the middle of its page (basis.py). So
q . k = q . (k - mean) + q . mean, whose last part is the same for all tokens of a page.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkvq.attention.layer_view import LayerCache
from jkvq.cache.layout import window_pages
from jkvq.cache.spec import CacheSpec
from jkvq.pallas_kernels.triton.decode import Shift


class MeanScores(NamedTuple):
    """q . mean for all pages of a sequence: those of its sink, of packed and of recent tokens."""

    scores: Float[Array, "B T N P"]
    sink: int  # pages of the sink
    packed: int  # pages of packed tokens
    spec: CacheSpec

    @property
    def of_pages(self) -> Float[Array, "B T N M"]:
        """Of the packed pages."""
        return self.scores[..., self.sink : self.sink + self.packed]

    def of_tokens(self, position: Int[Array, "B S"]) -> Float[Array, "B T N S"]:
        """Of tokens by their positions; anything where they are negative."""
        return jnp.take_along_axis(self.scores, self._number(position)[:, None, None], axis=-1)

    def shift(self, position: Int[Array, "B S"] | None = None) -> Shift:
        """As decode takes it: of the packed pages, or of slots with tokens of these positions."""
        scores = self.scores[:, 0]
        if position is None:
            return Shift(scores, first=self.sink)
        return Shift(scores, self._number(position))

    def _number(self, position: Int[Array, "B S"]) -> Int[Array, "B S"]:
        number = self.sink + self.spec.page_number(position)
        return jnp.clip(number, 0, self.scores.shape[-1] - 1)


def mean_scores(view: LayerCache, q: Float[Array, "B T N H"]) -> MeanScores | None:
    """Of queries as they come; None without a mean."""
    if view.key.mean is None:
        return None
    spec, packed = view.spec, view.cache.block_table.shape[1]
    sink = -(-spec.sink // spec.page)
    recent = window_pages(spec) if spec.windowed else 0
    number = jnp.arange(-sink, packed + recent)
    scores = view.key.mean_scores(q, view.layer, spec.page_middle(number))
    return MeanScores(scores, sink, packed, spec)
