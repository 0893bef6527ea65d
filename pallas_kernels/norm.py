"""RMS norm, of hidden states and of heads."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "*rows D"], weight: Float[Array, " D"], eps: float, *, of_one: bool
) -> Float[Array, "*rows D"]:
    """x / rms(x) * weight, the mean square taken in float32; or * (1 + weight), all in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    weight = jnp.expand_dims(weight, range(x.ndim - 1))
    if of_one:
        return (wide * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    return wide.astype(x.dtype) * weight
