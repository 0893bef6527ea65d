"""What the mean that keys are stored without adds to their scores: one number for each page.

A key is stored as k - mean, and its mean stands in the middle of its page (cache/basis.py). So
q . k = q . (k - mean) + q . mean, whose last part is the same for all tokens of a page.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkvq.cache.specs.spec import CacheSpec
from jkvq.pallas_kernels.types import Shift


class MeanScores(NamedTuple):
    """q . mean for all pages of a sequence."""

    scores: Float[Array, "B T N M"]
    spec: CacheSpec

    @property
    def of_packed(self) -> Float[Array, "B T N m"]:
        """Of the pages that may be packed: those behind the sink."""
        return self.scores[..., self.spec.sink_pages :]

    def of_tokens(self, position: Int[Array, "B S"]) -> Float[Array, "B T N S"]:
        """Of tokens by their positions; anything where they are negative."""
        number = page_of_position(self.spec, position, self.scores.shape[-1])
        return jnp.take_along_axis(self.scores, number[:, None, None], axis=-1)

    def shift(self, number: Int[Array, "B S"] | None = None) -> Shift:
        """As decode takes it: of packed pages, or of tokens of these pages."""
        scores = self.scores[:, 0]
        if number is None:
            return Shift(scores, first=self.spec.sink_pages)
        return Shift(scores, number)


def page_of_position(spec: CacheSpec, position: Int[Array, "B S"], pages: int) -> Int[Array, "B S"]:
    """The pages of tokens, of so many; any where their positions are negative."""
    return jnp.clip(spec.page_number(position), 0, pages - 1)
