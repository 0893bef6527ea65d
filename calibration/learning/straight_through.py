"""What codes give back of tokens, with a gradient.

A code is a whole number, whose derivative is 0 wherever it has one. Here it passes its gradient
straight through, as if it moved with the value that it codes, unless it is the least or the
greatest one. Scale and lo are fitted to the values and codes (affine.py, digits.py) and have
gradients of their own, so that what is lost grows with the values, as it does in the cache.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jkvq.cache.specs.spec import SideSpec
from jkvq.pallas_kernels.formats import affine
from jkvq.pallas_kernels.formats.digits import PARTS, fit_digits, places, worth
from jkvq.pallas_kernels.formats.words import as_bfloat16, as_float16

Rows = Float[Array, "*rows H"]


def read_back(spec: SideSpec, x: Rows) -> Rows:
    """x as the cache gives it back; ``spec`` has fitted steps, and neither clip nor centroids."""
    if spec.codec == "float":
        return x
    if spec.digits:
        return _digits(spec, x)
    groups = x.reshape(*x.shape[:-1], -1, spec.group or x.shape[-1])
    codes, scale, lo = affine.fit(groups, spec.bits, nearest_levels)
    return (_rounded(lo)[..., None] + _rounded(scale)[..., None] * codes).reshape(x.shape)


def as_window(spec: SideSpec, x: Rows) -> Rows:
    """x as a window hands it on; ``spec`` is of `CacheSpec.window_sides`."""
    if spec.codec == "float":
        return x if spec.bits == 32 else _through(as_float16, x)

    def coded(x: Rows) -> Rows:
        codes, scale, lo = affine.encode_min_max(x, spec.bits)
        return lo[..., None] + scale[..., None] * codes

    return _through(coded, x)


def _digits(spec: SideSpec, x: Rows) -> Rows:
    """The channels that digits give back: c (lo w + scale * code)."""
    parts, found = jnp.split(x, PARTS, axis=-1), places(spec.digits)
    columns = jnp.concatenate([parts[place.part] for place in found], axis=-1)
    codes, scale, lo = fit_digits(columns, spec.digits, spec.bits, nearest_levels)
    scale, lo = _rounded(scale)[..., None], _rounded(lo)[..., None]
    read = [jnp.zeros_like(parts[0])] * PARTS
    for own, place in zip(jnp.split(codes, PARTS, axis=-1), found, strict=True):
        if place.digit == 0:  # its other columns hold the same channels
            read[place.part] = place.factor(spec.bits) * (
                lo * worth(spec.bits, place.count) + scale * own
            )
    return jnp.concatenate(read, axis=-1)


def nearest_levels(x, scale, lo, bits: int, worth=1.0):
    """As `affine.nearest_levels`, with the gradient of the value where it is within the levels."""
    per_step = jnp.where(scale > 0, 1.0 / jnp.where(scale > 0, scale, 1.0), 0.0)
    level = (x - lo[..., None] * worth) * per_step[..., None]
    most = (2**bits - 1) * worth
    return _through(lambda level: _nearest(level, most), jnp.clip(level, -0.5, most + 0.5))


def _nearest(level: Array, most) -> Array:
    """Of levels from half a step below the least to half a step above the greatest."""
    return jnp.minimum(jnp.floor(level + 0.5), most)


def _rounded(x: Array) -> Array:
    return _through(as_bfloat16, x)


def _through(change: Callable[[Array], Array], x: Array) -> Array:
    """``change`` of x, with the gradient of x itself."""
    return x + jax.lax.stop_gradient(change(x) - x)
