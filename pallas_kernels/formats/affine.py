"""The token-wise affine quantizer: x^ = lo + scale * code, for each group of g channels.

Scale and lo are stored in bfloat16. Codes of min-max levels are chosen with the rounded ones; a
fitted step is stretched after its codes are chosen, and rounded last. The write kernel runs these
very functions. Attention never needs x^ itself:

    q . k^ = scale (q . code) + lo sum(q)          sum_t p_t v^_t = sum_t (p_t scale_t) code_t
                                                                    + sum_t p_t lo_t
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from jkvq.pallas_kernels.formats.words import as_bfloat16

# The step, in standard deviations, that serves a Gaussian best with 2^bits uniform levels.
GAUSSIAN_STEP = {2: 0.9957, 3: 0.5860, 4: 0.3352, 6: 0.1041, 8: 0.0308}
REFITS = 2

# Gives the nearest level of each value of a group, as `nearest_levels` does: (x, scale, lo, bits).
Levels = Callable[..., Array]


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
    x: Float[Array, "*rows g"], bits: int, levels: Levels | None = None
) -> tuple[Float[Array, "*rows g"], Float[Array, "*rows"], Float[Array, "*rows"]]:
    """(codes, scale, lo) with the levels from each group's least to its greatest value."""
    lo = x.min(-1)
    scale = (x.max(-1) - lo) / (2**bits - 1)
    scale, lo = as_bfloat16(scale), as_bfloat16(lo)
    return (levels or nearest_levels)(x, scale, lo, bits), scale, lo


def encode_fitted(
    x: Float[Array, "*rows g"], bits: int, levels: Levels | None = None
) -> tuple[Float[Array, "*rows g"], Float[Array, "*rows"], Float[Array, "*rows"]]:
    """(codes, scale, lo) with a step fitted to each group, stretched against shrinkage.

    Starts from the step that is best for a Gaussian; twice codes to the nearest level and refits
    scale and lo by least squares; then multiplies both by <x, x> / <x^, x>. Without the stretch
    packed keys would lose score against exact ones.
    """
    codes, scale, lo = fit(x, bits, levels or nearest_levels)
    return codes, as_bfloat16(scale), as_bfloat16(lo)


def fit(x: Float[Array, "*rows g"], bits: int, levels: Levels):
    """(codes, scale, lo) as ``encode_fitted`` finds them, before scale and lo are rounded."""
    total, squares = x.sum(-1), (x * x).sum(-1)
    mean = total / x.shape[-1]
    scale = GAUSSIAN_STEP[bits] * jnp.sqrt(jnp.maximum(squares / x.shape[-1] - mean * mean, 0.0))
    lo = mean - scale * ((2**bits - 1) / 2)
    for _ in range(REFITS):
        scale, lo = least_squares(x, mean, levels(x, scale, lo, bits), scale, lo)
    codes = levels(x, scale, lo, bits)
    shrunk = lo * total + scale * (codes * x).sum(-1)  # <x^, x>
    stretch = jnp.where(shrunk > 0, squares / jnp.where(shrunk > 0, shrunk, 1.0), 1.0)
    return codes, scale * stretch, lo * stretch


def least_squares(x, mean, codes, scale, lo, *, share=1.0, worth=1.0, norm=None):
    """Scale and lo that fit lo w + scale * code to x best; unchanged where all codes are equal.

    w is ``worth``: 1, but for channels of several digits (digits.py). ``mean`` is the best lo for a
    scale of 0. Channels count by their ``share``, and ``norm`` is the sum of share w^2.
    """
    norm = norm or x.shape[-1]
    code_sum = (codes * (share * worth)).sum(-1)
    code_mean, shared = code_sum / norm, codes * share
    spread = (shared * codes).sum(-1) - code_sum * code_mean
    slope = ((shared * x).sum(-1) - code_sum * mean) / jnp.where(spread > 0, spread, 1.0)
    fits = (spread > 0) & (slope > 0)
    return jnp.where(fits, slope, scale), jnp.where(fits, mean - slope * code_mean, lo)


def nearest_levels(x, scale, lo, bits: int, worth=1.0):
    """The code whose lo w + scale * code is nearest to each value, as a float."""
    per_step = jnp.where(scale > 0, 1.0 / jnp.where(scale > 0, scale, 1.0), 0.0)
    level = jnp.floor((x - lo[..., None] * worth) * per_step[..., None] + 0.5)
    return jnp.clip(level, 0, (2**bits - 1) * worth)
