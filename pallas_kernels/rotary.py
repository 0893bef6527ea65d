"""Rotary positions: channels i and i + H/2 of a head are a pair, which turns with its position."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def angles(
    frequency: Float[Array, " h"], position: Float[Array, "*n"] | Int[Array, "*n"]
) -> tuple[Float[Array, "*n h"], Float[Array, "*n h"]]:
    """(cos, sin), in float32, of the angle of every pair at every position."""
    each = jnp.expand_dims(jnp.asarray(frequency, jnp.float32), range(position.ndim))
    angle = position.astype(jnp.float32)[..., None] * each
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "*#n N H"], cos: Float[Array, "*#n h"], sin: Float[Array, "*#n h"]
) -> Float[Array, "*n N H"]:
    """x turned by these angles, computed in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def along_and_across(q: Float[Array, "*n H"], x: Float[Array, "*#n H"]) -> Float[Array, "*n H"]:
    """The numbers whose product with (cos, sin) of an angle is q . x, with x turned by it."""
    (a, b), (c, d) = (jnp.split(y.astype(jnp.float32), 2, axis=-1) for y in (q, x))
    return jnp.concatenate(jnp.broadcast_arrays(a * c + b * d, b * c - a * d), axis=-1)


def rotated_dots(
    q: Float[Array, "*n H"],
    x: Float[Array, "*#n H"],
    cos: Float[Array, "S h"],
    sin: Float[Array, "S h"],
) -> Float[Array, "*n S"]:
    """q . x, with x turned by each of S angles."""
    turns = jnp.concatenate([cos, sin], axis=-1)
    return jnp.einsum("...h,sh->...s", along_and_across(q, x), turns, precision="highest")
