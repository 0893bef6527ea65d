"""The token-wise affine quantizer: x^ = lo + scale * code, for each group of g channels.

Scale and lo are stored in bfloat16, and codes are computed with the rounded ones, so that what is
decoded is what was encoded. Attention never needs x^ itself:

    q . k^ = scale (q . code) + lo sum(q)          sum_t p_t v^_t = sum_t (p_t scale_t) code_t
                                                                    + sum_t p_t lo_t
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from jkvq.pallas_kernels.words import as_bfloat16

# The step, in standard deviations, that serves a Gaussian best with 2^bits uniform levels.
GAUSSIAN_STEP = {2: 0.9957, 3: 0.5860, 4: 0.3352, 8: 0.0308}
REFITS = 2


def clip_to_quantile(x: Float[Array, "*rows H"], quantile) -> Float[Array, "*rows H"]:
    """Clamps each row to plus and minus a quantile of its magnitudes (linear between ranks)."""
    magnitude = jnp.sort(jnp.abs(x), axis=-1)
    rank = jnp.asarray(quantile, jnp.float32) * (x.shape[-1] - 1)
    below = jnp.floor(rank).astype(jnp.int32)
    above = jnp.minimum(below + 1, x.shape[-1] - 1)
    part = rank - below.astype(jnp.float32)
    limit = magnitude[..., below] * (1 - part) + magnitude[..., above] * part
    return jnp.clip(x, -limit[..., None], limit[..., None])


def encode_min_max(
    x: Float[Array, "*rows H"], bits: int, group: int
) -> tuple[Int[Array, "*rows H"], Float[Array, "*rows n"], Float[Array, "*rows n"]]:
    """(codes, scale, lo) with the levels from each group's least to its greatest value."""
    x = _grouped(x, group)
    lo = x.min(-1)
    scale = (x.max(-1) - lo) / (2**bits - 1)
    scale, lo = as_bfloat16(scale), as_bfloat16(lo)
    return _codes(x, scale, lo, bits), scale, lo


def encode_fitted(
    x: Float[Array, "*rows H"], bits: int, group: int
) -> tuple[Int[Array, "*rows H"], Float[Array, "*rows n"], Float[Array, "*rows n"]]:
    """(codes, scale, lo) with a step fitted to each group, stretched against shrinkage.

    Starts from the step that is best for a Gaussian; twice codes to the nearest level and refits
    scale and lo by least squares; then multiplies both by <x, x> / <x^, x>. Without the stretch
    packed keys would lose score against exact ones.
    """
    x = _grouped(x, group)
    mean = x.mean(-1, keepdims=True)
    deviation = jnp.sqrt(jnp.mean((x - mean) ** 2, -1))
    scale = GAUSSIAN_STEP[bits] * deviation
    lo = mean[..., 0] - scale * ((2**bits - 1) / 2)
    for _ in range(REFITS):
        scale, lo = _least_squares(x, _levels(x, scale, lo, bits), scale, lo)
    decoded = lo[..., None] + scale[..., None] * _levels(x, scale, lo, bits)
    shrunk = (decoded * x).sum(-1)
    stretch = jnp.where(shrunk > 0, (x * x).sum(-1) / jnp.where(shrunk > 0, shrunk, 1.0), 1.0)
    codes = _codes(x, scale, lo, bits)
    return codes, as_bfloat16(scale * stretch), as_bfloat16(lo * stretch)


def _least_squares(x, codes, scale, lo):
    """Scale and lo that fit x on its codes best; unchanged where all codes are equal."""
    code_mean, x_mean = codes.mean(-1), x.mean(-1)
    spread = ((codes - code_mean[..., None]) ** 2).sum(-1)
    slope = ((codes - code_mean[..., None]) * x).sum(-1) / jnp.where(spread > 0, spread, 1.0)
    fits = (spread > 0) & (slope > 0)
    return jnp.where(fits, slope, scale), jnp.where(fits, x_mean - slope * code_mean, lo)


def _levels(x, scale, lo, bits: int):
    """The nearest level of each value, as a float."""
    per_step = jnp.where(scale > 0, 1.0 / jnp.where(scale > 0, scale, 1.0), 0.0)
    level = jnp.floor((x - lo[..., None]) * per_step[..., None] + 0.5)
    return jnp.clip(level, 0, 2**bits - 1)


def _codes(x, scale, lo, bits: int) -> Int[Array, "*rows H"]:
    codes = _levels(x, scale, lo, bits).astype(jnp.int32)
    return codes.reshape(*codes.shape[:-2], -1)


def _grouped(x: Array, group: int) -> Array:
    return x.reshape(*x.shape[:-1], -1, group)


def dot(
    q: Float[Array, "B T K G H"],
    codes: UInt8[Array, "B S K H"],
    scale: Float[Array, "B S K n"],
    lo: Float[Array, "B S K n"],
) -> Float[Array, "B T K G S"]:
    """q . x^ without x^."""
    n = scale.shape[-1]
    q, codes = _split(q, n), _split(codes.astype(jnp.float32), n)
    products = jnp.einsum("btkgnh,bsknh->btkgsn", q, codes, precision="highest")
    scaled = jnp.einsum("btkgsn,bskn->btkgs", products, scale, precision="highest")
    return scaled + jnp.einsum("btkgn,bskn->btkgs", q.sum(-1), lo, precision="highest")


def mix(
    weights: Float[Array, "B T K G S"],
    codes: UInt8[Array, "B S K H"],
    scale: Float[Array, "B S K n"],
    lo: Float[Array, "B S K n"],
) -> Float[Array, "B T K G H"]:
    """sum_s weights[s] x^[s] without x^."""
    n, H = scale.shape[-1], codes.shape[-1]
    codes = _split(codes.astype(jnp.float32), n)
    scaled = jnp.einsum("btkgs,bskn->btkgsn", weights, scale)
    out = jnp.einsum("btkgsn,bsknh->btkgnh", scaled, codes, precision="highest")
    base = jnp.einsum("btkgs,bskn->btkgn", weights, lo, precision="highest")
    return (out + base[..., None]).reshape(*weights.shape[:-1], H)


def _split(x: Array, n: int) -> Array:
    return x.reshape(*x.shape[:-1], n, -1)
