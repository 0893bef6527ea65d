"""The Lloyd-Max quantizer with norms (TurboQuant-MSE): x^ = unit * level[code].

The d channels of a group, rotated beforehand so that they look Gaussian, are divided by their norm
over sqrt(d), their unit, and coded to the nearest Lloyd-Max level of N(0, 1). The unit is stored in
float16. Groups of a head may have different widths; their channels stand together, widest group
first.

Levels are odd polynomials of the code, of four terms at most, so that kernels compute them instead
of looking them up. Up to 3 bits that leaves the Lloyd-Max levels as they are; above, the levels are
the best such polynomials, with 1.0001 (4 bits), 1.002, 1.011, 1.024 and 1.05 (8 bits) times the
error.
"""

import functools
import math
import statistics
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from jkvq.pallas_kernels.words import as_float16

MAX_BITS = 8
TERMS = 4  # of the polynomials


@functools.lru_cache
def level_coefficients(bits: int) -> tuple[float, ...]:
    """Of u, u^3, ... in the levels of N(0, 1), where code c is u = (2c + 1) / 2^bits - 1.

    Lloyd's iteration: cells of what is nearest to each level, then the polynomial that is nearest
    to the means of the cells.
    """
    powers = _powers(bits)
    # The best levels for many bits are the quantiles of a Gaussian of variance 3: start there.
    quantile = np.vectorize(statistics.NormalDist(sigma=math.sqrt(3)).inv_cdf)
    levels = quantile((np.arange(2**bits) + 0.5) / 2**bits)
    density = np.vectorize(lambda t: math.exp(-t * t / 2) / math.sqrt(2 * math.pi))
    below = np.vectorize(lambda t: 0.5 * (1 + math.erf(t / math.sqrt(2))))
    for _ in range(1000):
        edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        chance = below(edges[1:]) - below(edges[:-1])
        means = (density(edges[:-1]) - density(edges[1:])) / chance
        weight = np.sqrt(chance)
        found = np.linalg.lstsq(powers * weight[:, None], means * weight, rcond=None)[0]
        moved = powers @ found
        done, levels = np.abs(moved - levels).max() < 1e-7, moved
        if done:
            break
    return tuple(found.tolist())


def gaussian_levels(bits: int) -> tuple[float, ...]:
    """The 2^bits levels of N(0, 1), ascending."""
    return tuple((_powers(bits) @ level_coefficients(bits)).tolist())


def _powers(bits: int) -> np.ndarray:
    """u, u^3, ... of every code, [2^bits, terms]."""
    u = (2 * np.arange(2**bits) + 1) / 2**bits - 1
    return u[:, None] ** (2 * np.arange(min(TERMS, 2 ** (bits - 1))) + 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Allocation:
    """How wide each rotated channel's code is.

    width: bits of each channel, descending.
    offset: the bit of the head's stream where each channel's code begins.
    group: index of each channel's group, ascending; a group is the channels of equal width.
    size: channels of each group, 1 where there is no such group.
    """

    width: Int[Array, "K H"]
    offset: Int[Array, "K H"]
    group: Int[Array, "K H"]
    size: Int[Array, "K n"]


def uniform_allocation(heads: int, channels: int, bits: int) -> Allocation:
    """Every channel the same width, in one group."""
    each = jnp.tile(jnp.arange(channels, dtype=jnp.int32), (heads, 1))
    size = jnp.full((heads, 1), channels, jnp.int32)
    return Allocation(jnp.full_like(each, bits), each * bits, jnp.zeros_like(each), size)


def encode(
    x: Float[Array, "B T K H"], allocation: Allocation
) -> tuple[UInt8[Array, "B T K H"], Float[Array, "B T K n"]]:
    """(codes, units)."""
    squares = jnp.einsum("btkh,khn->btkn", x * x, _member(allocation), precision="highest")
    units = as_float16(jnp.sqrt(squares / allocation.size.astype(jnp.float32)[None, None]))
    unit = _of_channels(units, allocation)
    ratio = x / jnp.where(unit > 0, unit, 1.0)
    edges = _table(lambda levels: [*np.add(levels[1:], levels[:-1]) / 2, np.inf])
    codes = (ratio[..., None] > edges[allocation.width][None, None]).sum(-1)
    return codes.astype(jnp.uint8), units


def decode(
    codes: UInt8[Array, "B T K H"], units: Float[Array, "B T K n"], allocation: Allocation
) -> Float[Array, "B T K H"]:
    """x^."""
    levels = _table(lambda levels: levels).reshape(-1)
    chosen = levels[allocation.width[None, None] * 2**MAX_BITS + codes.astype(jnp.int32)]
    return chosen * _of_channels(units, allocation)


def _of_channels(units: Float[Array, "B T K n"], allocation: Allocation) -> Float[Array, "B T K H"]:
    """Each channel's own."""
    return jnp.einsum("btkn,khn->btkh", units, _member(allocation), precision="highest")


def _member(allocation: Allocation) -> Float[Array, "K H n"]:
    """1 where a channel belongs to a group, else 0."""
    return jax.nn.one_hot(allocation.group, allocation.size.shape[-1], dtype=jnp.float32)


def _table(row) -> Float[Array, "widths 256"]:
    """For each width from 0 to 8 a row made of its levels, filled up with infinities."""
    table = np.full((MAX_BITS + 1, 2**MAX_BITS), np.inf, np.float32)
    for bits in range(1, MAX_BITS + 1):
        values = row(np.asarray(gaussian_levels(bits)))
        table[bits, : len(values)] = values
    return jnp.asarray(table)
