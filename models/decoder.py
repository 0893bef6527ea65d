"""One decoder for every family: a Flax module tree run as a pure function of its parameters.

Parameters are a plain nested dict with one entry per layer, weights as checkpoints hold them,
[out, in], but for those of one input, which are joined (joined.py). A layer is what is compiled:
one program serves all layers of a kind, in seconds where a program of all layers takes minutes.
Code that is compiled as a whole unrolls them; a scan over stacked weights would copy each layer's
out first.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jkvq.models.config import ModelConfig
from jkvq.pallas_kernels.rotary import angles, rotate

Params = dict[str, Any]
Rotary = tuple[Float[Array, "B T H/2"], Float[Array, "B T H/2"]]  # cos, sin


class Attend(Protocol):
    """What a layer does with its queries, keys and values, which carry their rotary positions.

    A pytree, so that a compiled layer takes it as an argument: layers whose ``Attend`` differ in
    arrays alone share a program.
    """

    def __call__(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        state: Any,
        /,
    ) -> tuple[Float[Array, "B T N H"], Any]:
        """The attention's output and the state after this layer."""
        ...


def _weight(*shape: int) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape))


class Linear(nnx.Module):
    """y = x W^T + b. Float32 products are exact on every device (no TF32)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False):
        self.weight = _weight(outputs, inputs)
        self.bias = _weight(outputs) if bias else None

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        y = jnp.einsum("...i,oi->...o", x, self.weight[...], precision=_precision(x))
        return y if self.bias is None else y + jnp.expand_dims(self.bias[...], range(y.ndim - 1))


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, the mean square taken in float32."""

    def __init__(self, size: int, eps: float):
        self.weight = _weight(size)
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * jnp.expand_dims(self.weight[...], range(x.ndim - 1))


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, over whatever ``attend`` keeps."""

    def __init__(self, config: ModelConfig):
        self.config = config
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.qkv = Linear(config.width, queries + 2 * keys, bias=config.qk_bias or config.v_bias)
        self.o = Linear(queries, config.width, bias=config.out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def __call__(self, x, rotary, attend: Attend, state):
        (B, T, _), N, K = x.shape, self.config.heads, self.config.kv_heads
        heads = self.qkv(x).reshape(B, T, -1, self.config.head_dim)
        q, k, v = heads[:, :, :N], heads[:, :, N : N + K], heads[:, :, N + K :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        out, state = attend(q, k, v, state)
        return self.o(out.reshape(B, T, -1)), state


class MLP(nnx.Module):
    """The gated feed-forward block: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        self.gate_up = Linear(config.width, 2 * config.mlp_width, bias=config.mlp_bias)
        self.down = Linear(config.mlp_width, config.width, bias=config.mlp_bias)

    def __call__(self, x):
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Layer(nnx.Module):
    """A pre-norm transformer layer."""

    def __init__(self, config: ModelConfig):
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)

    def __call__(self, x, rotary, attend: Attend, state):
        mixed, state = self.attention(self.attention_norm(x), rotary, attend, state)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), state


def rotary_angles(config: ModelConfig, position: Int[Array, "B T"]) -> Rotary:
    """The angle of every rotary pair, in float32."""
    return angles(jnp.asarray(config.rope_frequency), position)


def _precision(x: Array) -> str | None:
    return "highest" if x.dtype == jnp.float32 else None


def abstract_params(config: ModelConfig, dtype) -> Params:
    """Shapes of every parameter: what a loader must fill."""

    def shapes(module: Callable[[], nnx.Module]) -> Params:
        state = nnx.to_pure_dict(nnx.state(nnx.eval_shape(module)))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), state)

    layer = shapes(lambda: Layer(config))
    params = {
        "embedding": jax.ShapeDtypeStruct((config.vocab, config.width), dtype),
        "layers": dict.fromkeys(range(config.layers), layer),
        "norm": shapes(lambda: RMSNorm(config.width, config.norm_eps)),
    }
    if not config.tied:
        params["head"] = shapes(lambda: Linear(config.width, config.vocab))
    return params


def weight_bytes(config: ModelConfig, dtype) -> int:
    """Bytes of all parameters."""
    leaves = jax.tree.leaves(abstract_params(config, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _bind(module: Callable[[], Any], params: Params):
    """A module over these parameters."""
    return nnx.merge(nnx.graphdef(nnx.eval_shape(module)), nnx.State(params))


@functools.partial(jax.jit, static_argnames="config")
def embed(
    config: ModelConfig,
    embedding: Float[Array, "V D"],
    tokens: Int[Array, "B T"],
    position: Int[Array, "B T"],
) -> tuple[Float[Array, "B T D"], Rotary]:
    """Hidden states before the first layer, and the tokens' rotary angles."""
    return embedding[tokens], rotary_angles(config, position)


def _layer(config, weights, x, rotary, attend, state):
    return _bind(lambda: Layer(config), weights)(x, rotary, attend, state)


_traced_once = jax.jit(_layer, static_argnames="config")
# A GPU's autotuner would compile Triton kernels for small products, for ten seconds to no gain; and
# a copy of three weights, to multiply with them at once, takes longer than it saves.
layer_program = jax.jit(
    _layer,
    static_argnames="config",
    donate_argnames="state",
    compiler_options={"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0},
)


def run_layer(
    config: ModelConfig,
    weights: Params,
    x: Float[Array, "B T D"],
    rotary: Rotary,
    attend: Attend,
    state: Any,
) -> tuple[Float[Array, "B T D"], Any]:
    """Hidden states after one layer, and the state, which is donated.

    By a program of its own, unless it is a part of one that is being compiled.
    """
    run = _traced_once if isinstance(x, jax.core.Tracer) else layer_program
    return run(config, weights, x, rotary, attend, state)


@functools.partial(jax.jit, static_argnames="config")
def finish(config: ModelConfig, norm: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Hidden states as the output head takes them."""
    return _bind(lambda: RMSNorm(config.width, config.norm_eps), norm)(x)


def run(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    position: Int[Array, "B T"],
    attend: Callable[[int], Attend],
    state: Any,
) -> tuple[Float[Array, "B T D"], Any]:
    """Runs tokens through the layers, each with its attention, which may keep a state."""
    x, rotary = embed(config, params["embedding"], tokens, position)
    for layer in range(config.layers):
        x, state = run_layer(config, params["layers"][layer], x, rotary, attend(layer), state)
    return finish(config, params["norm"], x), state


def logits(
    config: ModelConfig, params: Params, hidden: Float[Array, "*rows D"]
) -> Float[Array, "*rows V"]:
    """Scores of the next token, in float32."""
    weight = params["embedding"] if config.tied else params["head"]["weight"]
    return jnp.einsum(
        "...d,vd->...v",
        hidden,
        weight,
        precision=_precision(hidden),
        preferred_element_type=jnp.float32,
    )
