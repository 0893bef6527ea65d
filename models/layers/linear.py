"""Products with weights, and norms."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def weight_of(*shape: int) -> nnx.Param:
    """A parameter; a checkpoint fills it."""
    return nnx.Param(jnp.zeros(shape))


def precision_of(x: Array) -> str | None:
    """Float32 products are exact on every device (no TF32)."""
    return "highest" if x.dtype == jnp.float32 else None


class Linear(nnx.Module):
    """y = x W^T + b."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False):
        self.weight = weight_of(outputs, inputs)
        self.bias = weight_of(outputs) if bias else None

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        y = jnp.einsum("...i,oi->...o", x, self.weight[...], precision=precision_of(x))
        return y if self.bias is None else y + jnp.expand_dims(self.bias[...], range(y.ndim - 1))


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, the mean square taken in float32; or * (1 + weight), all in float32."""

    def __init__(self, size: int, eps: float, *, of_one: bool = False):
        self.weight = weight_of(size)
        self.eps, self.of_one = eps, of_one

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
        weight = jnp.expand_dims(self.weight[...], range(x.ndim - 1))
        if self.of_one:
            return (wide * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
        return wide.astype(x.dtype) * weight
