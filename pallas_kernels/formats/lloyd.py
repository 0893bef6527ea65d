"""The Lloyd-Max quantizer with norms (TurboQuant-MSE): x^ = unit * level[code].

The d channels of a group, in a random basis, are a random vector of their norm. Divided by norm /
sqrt(d), each is coded to the nearest of the levels that are best for a coordinate of such a vector:
of many channels those of a Gaussian, of few they lie closer together. The unit, stored in float16,
is norm / sqrt(d); a fitted one, |x|^2 / <x, level[code]>, gives x^ back the length along x that
every least-squares code loses. Groups of a head may have different widths; their channels stand
together, widest group first.

Levels are odd polynomials of the code, of four terms at most, so that kernels compute them instead
of looking them up. Up to 3 bits that leaves the Lloyd-Max levels as they are; above, the levels are
the best such polynomials, which for a Gaussian have 1.0001 (4 bits), 1.002, 1.011, 1.024 and 1.05
(8 bits) times the error, for small groups less.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, UInt8

from jkvq.pallas_kernels.formats.packing import stream_offsets
from jkvq.pallas_kernels.formats.words import as_float16

MAX_BITS = 8
TERMS = 4  # of the polynomials


@functools.lru_cache
def level_coefficients(bits: int, size: int) -> tuple[float, ...]:
    """The polynomial whose values are the levels: coefficients of u, u^3, ...

    The level of code c, in groups of ``size`` channels, is its value at u = (2c + 1) / 2^bits - 1.

    Lloyd's iteration over a coordinate t of random vectors of norm sqrt(size), whose density is
    proportional to (1 - t^2 / size)^((size - 3) / 2): cells of what is nearest to each level, then
    the polynomial that is nearest to the means of the cells.
    """
    # It takes a third of a second to import, which caches with other codecs need not wait for.
    from scipy.special import betainc, betaincinv, gammaln  # noqa: PLC0415

    u = _places(bits)
    powers = u[:, None] ** (2 * np.arange(min(TERMS, 2 ** (bits - 1))) + 1)
    # The best levels for many bits are quantiles of the density's cubic root: start there.
    levels = np.sign(u) * np.sqrt(size * betaincinv(0.5, size / 6 + 0.5, np.abs(u)))
    half = (size - 1) / 2
    constant = np.exp(gammaln(size / 2) - gammaln(half)) / np.sqrt(np.pi * size)
    found = levels[:0]
    for _ in range(1000):
        inner = (levels[1:] + levels[:-1]) / 2
        edges = np.concatenate([[-np.sqrt(size)], inner, [np.sqrt(size)]])
        share = np.minimum(edges**2 / size, 1.0)
        chance = np.diff(np.sign(edges) * betainc(0.5, half, share) / 2)
        means = -np.diff(constant * size / (size - 1) * (1 - share) ** half) / chance
        weight = np.sqrt(chance)
        found = np.linalg.lstsq(powers * weight[:, None], means * weight, rcond=None)[0]
        moved = powers @ found
        done, levels = np.abs(moved - levels).max() < 1e-7, moved
        if done:
            break
    return tuple(found.tolist())


def group_levels(bits: int, size: int) -> Float[np.ndarray, " levels"]:
    """The 2^bits levels of groups of ``size`` channels, ascending."""
    found = level_coefficients(bits, size)
    return sum(c * _places(bits) ** (2 * i + 1) for i, c in enumerate(found))


def _places(bits: int) -> Float[np.ndarray, " levels"]:
    """u = (2c + 1) / 2^bits - 1 of every code c."""
    return (2 * np.arange(2**bits) + 1) / 2**bits - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Allocation:
    """How wide each rotated channel's code is.

    width: bits of each channel, descending.
    offset: the bit of the head's stream where each channel's code begins.
    group: index of each channel's group, ascending; a group is the channels of equal width.
    size: channels of each group, 1 where there is no such group.
    levels: the coefficients of each channel's levels.
    """

    width: Int[Array, "K H"]
    offset: Int[Array, "K H"]
    group: Int[Array, "K H"]
    size: Int[Array, "K n"]
    levels: Float[Array, "K H terms"]


def uniform_allocation(heads: int, channels: int, bits: int) -> Allocation:
    """Every channel the same width, in one group."""
    each = np.tile(np.arange(channels), (heads, 1))
    return make_allocation(np.full_like(each, bits), np.zeros_like(each), groups=1)


def make_allocation(
    width: Int[np.ndarray, "*L K H"], group: Int[np.ndarray, "*L K H"], *, groups: int
) -> Allocation:
    """The allocation of widths and groups to channels, at most so many groups in a head."""
    members = group[..., None] == np.arange(groups)
    size = np.maximum(members.sum(-2), 1)
    own = np.take_along_axis(size, group, axis=-1)
    levels = np.zeros((*width.shape, TERMS))
    for pair in set(zip(width.ravel().tolist(), own.ravel().tolist(), strict=True)):
        found = level_coefficients(*pair)
        levels[(width == pair[0]) & (own == pair[1]), : len(found)] = found
    bits, index, count = (jnp.asarray(x, jnp.int32) for x in (width, group, size))
    return Allocation(bits, stream_offsets(bits), index, count, jnp.asarray(levels, jnp.float32))


def encode(
    x: Float[Array, "B T K H"], allocation: Allocation, *, fitted: bool
) -> tuple[UInt8[Array, "B T K H"], Float[Array, "B T K n"]]:
    """The code of each channel, and the unit of each group."""
    squares = _of_groups(x * x, allocation)
    units = jnp.sqrt(squares / allocation.size.astype(jnp.float32)[None, None])
    ratio = x / _of_channels(_or_one(units), allocation)
    codes = _nearest(ratio, allocation)
    if fitted:
        units = squares / _or_one(_of_groups(x * _chosen(codes, allocation), allocation))
    return codes, as_float16(units)


def decode(
    codes: UInt8[Array, "B T K H"], units: Float[Array, "B T K n"], allocation: Allocation
) -> Float[Array, "B T K H"]:
    """x^ = unit * level[code]."""
    return _chosen(codes, allocation) * _of_channels(units, allocation)


def _nearest(ratio: Float[Array, "B T K H"], allocation: Allocation) -> UInt8[Array, "B T K H"]:
    """The codes of the nearest levels, bit by bit from the highest."""
    count = jnp.left_shift(1, allocation.width)[None, None]
    codes = jnp.zeros(ratio.shape, jnp.int32)
    for bit in reversed(range(MAX_BITS)):
        trial = codes + 2**bit
        edge = (_chosen(trial - 1, allocation) + _chosen(trial, allocation)) / 2
        codes = jnp.where((trial < count) & (ratio > edge), trial, codes)
    return codes.astype(jnp.uint8)


def _chosen(codes: Integer[Array, "B T K H"], allocation: Allocation) -> Float[Array, "B T K H"]:
    """The level of every code: u (c0 + c1 u^2 + ...)."""
    steps = jnp.exp2(-allocation.width.astype(jnp.float32))[None, None]
    u = (2 * codes.astype(jnp.float32) + 1) * steps - 1
    *lower, total = jnp.moveaxis(allocation.levels[None, None], -1, 0)
    for coefficient in reversed(lower):
        total = total * (u * u) + coefficient
    return u * total


def _or_one(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """To divide by: 1 for what is not positive."""
    return jnp.where(x > 0, x, 1.0)


def _of_groups(x: Float[Array, "B T K H"], allocation: Allocation) -> Float[Array, "B T K n"]:
    """Summed over the channels of each group."""
    return jnp.einsum("btkh,khn->btkn", x, _member(allocation), precision="highest")


def _of_channels(units: Float[Array, "B T K n"], allocation: Allocation) -> Float[Array, "B T K H"]:
    """Each channel's own."""
    return jnp.einsum("btkn,khn->btkh", units, _member(allocation), precision="highest")


def _member(allocation: Allocation) -> Float[Array, "K H n"]:
    """1 where a channel belongs to a group, else 0."""
    return jax.nn.one_hot(allocation.group, allocation.size.shape[-1], dtype=jnp.float32)
