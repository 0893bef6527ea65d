"""Products with weights, and norms."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jkvq.pallas_kernels.norm import rms_norm
from jkvq.pallas_kernels.settings import has_gpu, is_hopper
from jkvq.pallas_kernels.types import Unsummed


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
        return self.unsummed(x).total

    def unsummed(self, x: Float[Array, "*rows I"]) -> Unsummed:
        """y, for whoever adds to it anyway: several parts where a few rows meet a kernel."""
        weight, bias = self.weight[...], None if self.bias is None else self.bias[...]
        if is_hopper():
            # Loads a kernel, which nobody needs who has no such GPU.
            from jkvq.pallas_kernels.mosaic.thin_product import (  # noqa: PLC0415
                serves,
                thin_product,
            )

            if serves(x, weight):
                return Unsummed(thin_product(x, weight), bias, x.dtype)
        y = jnp.einsum("...i,oi->...o", x, weight, precision=precision_of(x))
        return Unsummed(y[None], bias, x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, or * (1 + weight)."""

    def __init__(self, size: int, eps: float, *, of_one: bool = False):
        self.weight = weight_of(size)
        self.eps, self.of_one = eps, of_one

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return rms_norm(x, self.weight[...], self.eps, of_one=self.of_one)

    def after(
        self, x: Float[Array, "B T D"], more: Unsummed
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """x and more, and the norm of that; on a GPU by a kernel."""
        if not has_gpu():
            x = x + more.total
            return x, self(x)
        # Loads a kernel, which nobody needs who has no GPU.
        from jkvq.pallas_kernels.triton.add_norm import add_norm  # noqa: PLC0415

        return add_norm(x, more, self.weight[...], self.eps, of_one=self.of_one)
