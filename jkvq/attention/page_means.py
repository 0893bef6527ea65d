"""What the mean that keys are stored without adds to their scores: one number for each page.

A key is stored as k - mean, and its mean stands in the middle of its page (cache/basis.py). So
q . k = q . (k - mean) + q . mean, whose last part is the same for all tokens of a page. Pages are
numbered here from the sink's first on: those of the sink, of packed and of recent tokens.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkvq.cache.basis import Angles
from jkvq.cache.layout import pages_of_window
from jkvq.cache.specs.spec import CacheSpec
from jkvq.pallas_kernels.types import Shift


def count_sink_pages(spec: CacheSpec) -> int:
    """Pages of the sink, the first of which may be a part of one."""
    return -(-spec.sink // spec.page)


def number_pages(spec: CacheSpec, packed: int) -> Int[Array, " P"]:
    """The numbers, as `CacheSpec.page_number` counts, of all pages with so many packed ones."""
    return jnp.arange(-count_sink_pages(spec), packed + pages_of_window(spec))


def page_of_position(
    spec: CacheSpec, position: Int[Array, "B S"], packed: int
) -> Int[Array, "B S"]:
    """Which of these pages tokens belong to; any where their positions are negative."""
    last = count_sink_pages(spec) + packed + pages_of_window(spec) - 1
    return jnp.clip(count_sink_pages(spec) + spec.page_number(position), 0, last)


def packed_pages(spec: CacheSpec, angles: Angles, packed: int) -> Angles:
    """Of the angles of all pages those of the packed ones, [1, M, H/2]."""
    first = count_sink_pages(spec)
    return Angles(*(x[None, first : first + packed] for x in angles))


class MeanScores(NamedTuple):
    """q . mean for all pages of a sequence."""

    scores: Float[Array, "B T N P"]
    spec: CacheSpec
    packed: int  # pages of packed tokens

    @property
    def of_pages(self) -> Float[Array, "B T N M"]:
        """Of the packed pages."""
        sink = count_sink_pages(self.spec)
        return self.scores[..., sink : sink + self.packed]

    def of_tokens(self, position: Int[Array, "B S"]) -> Float[Array, "B T N S"]:
        """Of tokens by their positions; anything where they are negative."""
        number = page_of_position(self.spec, position, self.packed)
        return jnp.take_along_axis(self.scores, number[:, None, None], axis=-1)

    def shift(self, number: Int[Array, "B S"] | None = None) -> Shift:
        """As decode takes it: of the packed pages, or of slots with tokens of these pages."""
        scores = self.scores[:, 0]
        if number is None:
            return Shift(scores, first=count_sink_pages(self.spec))
        return Shift(scores, number)
