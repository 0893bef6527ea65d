"""The feed-forward block."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jkvq.models.config import ModelConfig
from jkvq.models.layers.linear import Linear
from jkvq.pallas_kernels.settings import is_hopper
from jkvq.pallas_kernels.types import Unsummed

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class MLP(nnx.Module):
    """The gated feed-forward block: down(act(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, width: int | None = None):
        width = config.mlp_width if width is None else width
        self.activation = config.activation
        self.gate_up = Linear(config.width, 2 * width, bias=config.mlp_bias)
        self.down = Linear(width, config.width, bias=config.mlp_bias)

    def __call__(self, x: Float[Array, "*rows D"]) -> Unsummed:
        """What the block adds."""
        return self.down.unsummed(self._gated(x))

    def _gated(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows F"]:
        weight = self.gate_up.weight[...]
        if is_hopper() and self.gate_up.bias is None:
            # Loads a kernel, which nobody needs who has no such GPU.
            from jkvq.pallas_kernels.mosaic.thin_product import (  # noqa: PLC0415
                gated_thin_product,
                serves_gated,
            )

            if serves_gated(x, weight):
                return gated_thin_product(x, weight, ACTIVATIONS[self.activation])
        return gated(self.activation, self.gate_up(x))


def clamped(
    gate_up: Float[Array, "*rows _"], clamp: float, sharpness: float
) -> Float[Array, "*rows F"]:
    """(up + 1) gate sigmoid(sharpness gate), of the two side by side, clamped."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    gate, up = jnp.minimum(gate, clamp), jnp.clip(up, -clamp, clamp)
    return (up + 1) * gate * jax.nn.sigmoid(sharpness * gate)


def gated(activation: str, gate_up: Float[Array, "*rows _"]) -> Float[Array, "*rows F"]:
    """act(gate) * up, of the two side by side."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return ACTIVATIONS[activation](gate) * up
