"""Digits: some channels get wider codes than others, but all stored codes are equally wide.

A head stores as many codes of ``bits`` bits (columns) as it has channels. ``digits`` says how many
columns each quarter of its channels gets: with (2, 1, 1, 0) and 2 bits the first quarter is coded
in 4 bits, the next two in 2, and the last is not stored. A wide code is written in its columns as a
number is in digits of base 2^bits, the lowest first. All columns share one scale and lo, and a
column is read as lo + scale * digit like any affine code; so a channel is read as

    x^ = c (lo w + scale * code)        w = sum_j 2^(bits j)

The constant c > 1 makes up for the length that the best codes of a Gaussian lose. Kernels that read
columns need not know of it: a query is spread over the columns, times c 2^(bits j) for digit j.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jkvq.pallas_kernels.formats import affine
from jkvq.pallas_kernels.formats.words import as_bfloat16

PARTS = 4
MAX_BITS = 6  # of all digits of a channel: kernels hold queries in float16
# The squared error of a Gaussian of variance 1 with 2^bits uniform levels at the best step.
GAUSSIAN_ERROR = {2: 0.1188, 3: 0.0374, 4: 0.0115, 6: 0.0010, 8: 0.0001}


class Place(NamedTuple):
    """Which channels, and which of their digits, a quarter of the columns holds."""

    part: int  # quarter of the channels
    digit: int  # which of their digits
    count: int  # of how many

    def factor(self, bits: int) -> float:
        """What a unit of such a column is in its channel: c 2^(bits j)."""
        return 2.0 ** (bits * self.digit) / (1 - GAUSSIAN_ERROR[bits * self.count])


def places(digits: tuple[int, ...]) -> list[Place]:
    """The place of each quarter of the columns."""
    return [Place(i, j, count) for i, count in enumerate(digits) for j in range(count)]


def place_of(column: int, digits: tuple[int, ...], channels: int) -> tuple[int, Place]:
    """The channel of a column, and its place."""
    size = channels // PARTS
    place = places(digits)[column // size]
    return place.part * size + column % size, place


def column_channels(digits: tuple[int, ...], channels: int) -> Int[np.ndarray, " H"]:
    """The channel of every column."""
    size = channels // PARTS
    return np.concatenate([place.part * size + np.arange(size) for place in places(digits)])


def worth(bits: int, count: int) -> int:
    """w = sum_j 2^(bits j) of a channel with so many digits: what lo counts in it."""
    return sum(1 << (bits * j) for j in range(count))


def relative_step(bits: int, count: int) -> float:
    """The best step for a Gaussian coded in so many digits, over the best step for one digit."""
    return affine.GAUSSIAN_STEP[bits * count] / affine.GAUSSIAN_STEP[bits]


class Columns(NamedTuple):
    """What coding has to know of each column."""

    channel: Int[Array, " H"]
    digit: Int[Array, " H"]
    worth: Float[Array, " H"]  # w of its channel
    share: Float[Array, " H"]  # 1 over the columns of its channel: together they count once
    step: Float[Array, " H"]  # relative, of its channel


def columns(digits: tuple[int, ...], bits: int, channels: int) -> Columns:
    """All columns of a head, in operations that kernels take as well."""
    column = lax.iota(jnp.int32, channels)
    size, found = channels // PARTS, places(digits)

    def each(numbers: list, dtype):
        chosen = jnp.full(channels, numbers[0], dtype)
        for i, number in enumerate(numbers[1:], 1):
            chosen = jnp.where(column >= i * size, jnp.asarray(number, dtype), chosen)
        return chosen

    return Columns(
        column + each([(place.part - i) * size for i, place in enumerate(found)], jnp.int32),
        each([place.digit for place in found], jnp.int32),
        each([worth(bits, place.count) for place in found], jnp.float32),
        each([1 / place.count for place in found], jnp.float32),
        each([relative_step(bits, place.count) for place in found], jnp.float32),
    )


def encode_digits(
    x: Float[Array, "*rows H"],
    digits: tuple[int, ...],
    bits: int,
    levels: affine.Levels = affine.nearest_levels,
) -> tuple[Float[Array, "*rows H"], Float[Array, "*rows"], Float[Array, "*rows"]]:
    """(codes, scale, lo) of columns that each hold their channel; a step fitted to each head.

    As affine.encode_fitted, but for the stretch, which is c. Channels must be such that the step
    which is best for a Gaussian is the same in all.
    """
    codes, scale, lo = fit_digits(x, digits, bits, levels)
    return codes, as_bfloat16(scale), as_bfloat16(lo)


def fit_digits(
    x: Float[Array, "*rows H"], digits: tuple[int, ...], bits: int, levels: affine.Levels
):
    """(codes, scale, lo) as ``encode_digits`` finds them, before scale and lo are rounded."""
    size = x.shape[-1] // PARTS
    found = columns(digits, bits, x.shape[-1])
    share, worths, step = (_like(x, y) for y in (found.share, found.worth, found.step))
    stored = [count for count in digits if count]
    norm = float(size * sum(worth(bits, count) ** 2 for count in stored))
    mean = (x * (share * worths)).sum(-1) / norm
    # The sum of ((x - mean w) step)^2, by sums that do not wait for the mean
    weight = share * step * step
    energy, cross = (x * x * weight).sum(-1), (x * (weight * worths)).sum(-1)
    both = [worth(bits, count) * relative_step(bits, count) for count in stored]
    square = energy - mean * (2 * cross - mean * size * sum(y * y for y in both))
    variance = jnp.maximum(square, 0.0) / (size * len(stored))
    scale = affine.GAUSSIAN_STEP[bits] * jnp.sqrt(variance)
    lo = mean - scale * ((2**bits - 1) / 2)
    how = {"share": share, "worth": worths, "norm": norm}
    for _ in range(affine.REFITS):
        codes = levels(x, scale, lo, bits, worths)
        scale, lo = affine.least_squares(x, mean, codes, scale, lo, **how)
    return levels(x, scale, lo, bits, worths), scale, lo


def _like(x: Array, each: Array) -> Array:
    """A number for each column, with the axes of x."""
    return jnp.expand_dims(each, range(x.ndim - 1))


def gathered(
    x: Float[Array, "*rows H"], digits: tuple[int, ...], bits: int
) -> Float[Array, "*rows H"]:
    """The channels that columns make up; 0 where one has none."""
    found = [jnp.zeros_like(x[..., : x.shape[-1] // PARTS])] * PARTS
    for part, place in zip(jnp.split(x, PARTS, axis=-1), places(digits), strict=True):
        found[place.part] = found[place.part] + part * place.factor(bits)
    return jnp.concatenate(found, axis=-1)
