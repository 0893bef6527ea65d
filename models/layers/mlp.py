"""The feed-forward block."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jkvq.models.config import ModelConfig
from jkvq.models.layers.linear import Linear

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

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return self.down(gated(self.activation, self.gate_up(x)))


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
