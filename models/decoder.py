"""One decoder for every family: a Flax module tree run as a pure function of its parameters.

Parameters are a plain nested dict with one entry per layer, weights as checkpoints hold them,
[out, in], but for those of one input, which are joined (joined.py). A layer is what is compiled:
one program serves all layers of a kind, in seconds where a program of all layers takes minutes.
Code that is compiled as a whole unrolls them; a scan over stacked weights would copy each layer's
out first.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jkvq.models.config import ModelConfig
from jkvq.models.layers.attention import Attend, Attention, Rotary
from jkvq.models.layers.experts import ExpertMLP
from jkvq.models.layers.latent_attention import LatentAttention
from jkvq.models.layers.linear import Linear, RMSNorm, precision_of
from jkvq.models.layers.mlp import MLP
from jkvq.pallas_kernels.rotary import angles
from jkvq.pallas_kernels.types import Unsummed

Params = dict[str, Any]


class Hidden(NamedTuple):
    """Hidden states, as a sum: what the last block adds is added where the next one takes it."""

    x: Float[Array, "B T D"]
    more: Unsummed

    @classmethod
    def of(cls, x: Float[Array, "B T D"]) -> "Hidden":
        """To which nothing is added."""
        return cls(x, Unsummed.of(jnp.zeros_like(x)))

    @property
    def total(self) -> Float[Array, "B T D"]:
        return self.x + self.more.total


class Layer(nnx.Module):
    """A transformer layer: attention and a feed-forward block, normed before, after, or both."""

    def __init__(self, config: ModelConfig):
        self.attention_norm, self.mlp_norm = (
            _norm(config) if config.pre_norm else None for _ in range(2)
        )
        self.attention_out_norm, self.mlp_out_norm = (
            _norm(config) if config.post_norm else None for _ in range(2)
        )
        self.attention = Attention(config) if config.latent is None else LatentAttention(config)
        self.mlp = MLP(config) if config.experts is None else ExpertMLP(config)

    def __call__(self, hidden: Hidden, rotary: tuple[Rotary, ...], attend: Attend, state):
        x, normed = _taken(self.attention_norm, hidden)
        mixed, state = self.attention(normed, rotary, attend, state)
        x, normed = _taken(self.mlp_norm, _added(x, self.attention_out_norm, mixed))
        return _added(x, self.mlp_out_norm, self.mlp(normed)), state


def _norm(config: ModelConfig) -> RMSNorm:
    return RMSNorm(config.width, config.norm_eps, of_one=config.norm_of_one)


def _added(x: Array, norm: RMSNorm | None, more: Unsummed) -> Hidden:
    """Hidden states and what a block adds to them, normed if it is."""
    return Hidden(x, more if norm is None else Unsummed.of(norm(more.total)))


def _taken(norm: RMSNorm | None, hidden: Hidden):
    """Hidden states, and as the next block takes them."""
    if norm is not None:
        return norm.after(*hidden)
    return hidden.total, hidden.total


def rotary_angles(config: ModelConfig, position: Int[Array, "B T"]) -> tuple[Rotary, ...]:
    """The angle of every rotary pair, in float32: of all layers, and of local ones if it has any.

    A layer takes those of its config's ``rotary``.
    """
    return tuple(angles(jnp.asarray(each), position) for each in config.rope_frequencies)


def abstract_params(config: ModelConfig, dtype) -> Params:
    """Shapes of every parameter: what a loader must fill."""

    def shapes(module: Callable[[], nnx.Module]) -> Params:
        state = nnx.to_pure_dict(nnx.state(nnx.eval_shape(module)))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), state)

    kinds = [config.layer(layer) for layer in range(config.layers)]
    of_kind = {kind: shapes(lambda kind=kind: Layer(kind)) for kind in set(kinds)}
    params = {
        "embedding": jax.ShapeDtypeStruct((config.vocab, config.width), dtype),
        "layers": {layer: of_kind[kind] for layer, kind in enumerate(kinds)},
        "norm": shapes(lambda: _norm(config)),
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
) -> tuple[Hidden, tuple[Rotary, ...]]:
    """Hidden states before the first layer, and the tokens' rotary angles."""
    x, scale = embedding[tokens], config.embedding_scale
    x = x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)
    return Hidden.of(x), rotary_angles(config, position)


def _layer(config, weights, hidden, rotary, attend, state):
    return _bind(lambda: Layer(config), weights)(hidden, rotary, attend, state)


_traced_once = jax.jit(_layer, static_argnames="config")
# A GPU's autotuner would compile Triton kernels for small products, for ten seconds to no gain; and
# a copy of three weights, to multiply with them at once, takes longer than it saves. Launches are
# recorded for the weights of each layer: XLA keeps 16 recordings unless told, and of a model with
# more layers it would have none when it comes round.
layer_program = jax.jit(
    _layer,
    static_argnames="config",
    donate_argnames="state",
    compiler_options={
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_dot_merger_threshold_mb": 0,
        "xla_cmd_buffer_trace_cache_size": 128,
    },
)


def run_layer(
    config: ModelConfig,
    weights: Params,
    hidden: Hidden,
    rotary: tuple[Rotary, ...],
    attend: Attend,
    state: Any,
) -> tuple[Hidden, Any]:
    """Hidden states after one layer, and the state, which is donated.

    ``config`` is the layer's own. By a program of its own, unless it is a part of one that is being
    compiled.
    """
    run = _traced_once if isinstance(hidden.x, jax.core.Tracer) else layer_program
    return run(config, weights, hidden, rotary, attend, state)


@functools.partial(jax.jit, static_argnames="config")
def finish(config: ModelConfig, norm: Params, hidden: Hidden) -> Float[Array, "B T D"]:
    """Hidden states as the output head takes them."""
    return _bind(lambda: _norm(config), norm).after(*hidden)[1]


def run(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    position: Int[Array, "B T"],
    attend: Callable[[int], Attend],
    state: Any,
) -> tuple[Float[Array, "B T D"], Any]:
    """Runs tokens through the layers, each with its attention, which may keep a state."""
    hidden, rotary = embed(config, params["embedding"], tokens, position)
    for layer in range(config.layers):
        of_layer = config.layer(layer), params["layers"][layer]
        hidden, state = run_layer(*of_layer, hidden, rotary, attend(layer), state)
    return finish(config, params["norm"], hidden), state


def without_layers(params: Params) -> Params:
    """What `finish` and `logits` need. Each array that a program takes costs its caller time."""
    return {name: own for name, own in params.items() if name != "layers"}


def logits(
    config: ModelConfig, params: Params, hidden: Float[Array, "*rows D"]
) -> Float[Array, "*rows V"]:
    """Scores of the next token, in float32."""
    weight = params["embedding"] if config.tied else params["head"]["weight"]
    scores = jnp.einsum(
        "...d,vd->...v",
        hidden,
        weight,
        precision=precision_of(hidden),
        preferred_element_type=jnp.float32,
    )
    cap = config.logit_cap
    return scores if cap is None else cap * jnp.tanh(scores / cap)
