"""What the mean that keys are stored without adds to their scores: one number for each page.

A key is stored as k - mean, and its mean stands in the middle of its page (cache/basis.py). So
q . k = q . (k - mean) + q . mean, whose last part is the same for all tokens of a page.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float16, Int

from jkvq.cache.specs.spec import CacheSpec
from jkvq.pallas_kernels.types import Shift


class PageMeans(NamedTuple):
    """q . mean for all pages of a sequence: queries by the turns of the pages."""

    queries: Float[Array, "B T N H"]
    turns: Float16[Array, "M H"]
    spec: CacheSpec

    @property
    def scores(self) -> Float[Array, "B T N M"]:
        turns = self.turns.astype(jnp.float32)
        return jnp.einsum("btnh,mh->btnm", self.queries, turns, precision="highest")

    @property
    def of_packed(self) -> Float[Array, "B T N m"]:
        """Of the pages that may be packed: those behind the sink."""
        return self.scores[..., self.spec.sink_pages :]

    def of_tokens(self, position: Int[Array, "B S"]) -> Float[Array, "B T N S"]:
        """Of tokens by their positions; anything where they are negative."""
        number = page_of_position(self.spec, position, len(self.turns))
        return jnp.take_along_axis(self.scores, number[:, None, None], axis=-1)

    def shift(self, number: Int[Array, "B S"] | None = None) -> Shift:
        """As decode takes it: of packed pages, or of tokens of these pages."""
        first = self.spec.sink_pages if number is None else 0
        return Shift(self.queries[:, 0], self.turns, number, first)


def page_of_position(spec: CacheSpec, position: Int[Array, "B S"], pages: int) -> Int[Array, "B S"]:
    """The pages of tokens, of so many; any where their positions are negative."""
    return jnp.clip(spec.page_number(position), 0, pages - 1)
