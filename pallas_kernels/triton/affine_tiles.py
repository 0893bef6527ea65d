"""The affine quantizer (affine.py) on the tiles of a kernel: what is done otherwise there."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plt

_WHOLE = 1.5 * 2.0**23  # what is added to it comes out rounded to a whole number


def clip_tile(x, quantile):
    """Clamps each row to a quantile of its magnitudes: takes the greatest away, one by one."""
    channels = x.shape[1]
    # Magnitudes as integers, which are in the same order. Their last bits number the channels, so
    # that no two are equal.
    number = lax.broadcasted_iota(jnp.uint32, x.shape, 1)
    cleared = jnp.uint32(0x80000000 - channels)
    magnitude = (lax.bitcast_convert_type(x, jnp.uint32) & cleared) | number
    rank = quantile * (channels - 1)
    below = jnp.floor(rank)
    part = rank - below
    greater = channels - 1 - below  # how many are greater than the one at ``below``

    def take(_, carry):
        _, found = carry
        # What is less comes out greatest: the difference goes round.
        return found, found + (magnitude - found[:, None]).max(1)

    top = magnitude.max(1)
    above, found = (
        lax.bitcast_convert_type(x, jnp.float32)
        for x in lax.fori_loop(0, greater.astype(jnp.int32), take, (top, top))
    )
    limit = (found * (1 - part) + above * part)[:, None]
    return jnp.minimum(jnp.maximum(x, -limit), limit)


def nearest_levels(x, scale, lo, bits: int, worth=None):
    """affine.nearest_levels, but for ties, in three instructions for each value."""
    top = 2.0**bits - 1
    per_range = jnp.where(scale > 0, 1.0 / jnp.where(scale > 0, scale * top, 1.0), 0.0)
    numbers = [per_range[..., None], (-lo * per_range)[..., None]]
    times = _constant(top)
    if worth is not None:  # lo w over a range of scale top w is lo over one of scale top
        numbers, times = [numbers[0] / worth, numbers[1], worth * top], "$4"
    args = [x, *(jnp.broadcast_to(number, x.shape) for number in numbers)]
    (levels,) = plt.elementwise_inline_asm(
        f"""{{
            .reg .f32 t;
            fma.rn.sat.f32 t, $1, $2, $3;
            fma.rn.f32 t, t, {times}, {_constant(_WHOLE)};
            sub.f32 $0, t, {_constant(_WHOLE)};
        }}""",
        args=args,
        constraints=",".join(["=f"] + ["f"] * len(args)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return levels


def _constant(x: float) -> str:
    """A float32 number in assembly."""
    return f"0f{int(np.float32(x).view(np.uint32)):08X}"


def to_integers(codes):
    """Whole numbers below 2^22 as integers, of which only the last 22 bits count."""
    return lax.bitcast_convert_type(codes + _WHOLE, jnp.int32)
