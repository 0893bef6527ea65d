"""A feed-forward block of experts: each token goes through a few that a router chooses.

The rows of all tokens are sorted by their experts, so that the experts are one ragged product.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jkvq.models.config import Experts, ModelConfig
from jkvq.models.layers.linear import Linear, precision_of, weight_of
from jkvq.models.layers.mlp import MLP, clamped, gated

# Rows [m, I] by the matrices [E, O, I] of their experts
_BY_EXPERT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(0,),
)


class ExpertLinear(nnx.Module):
    """y = x W_e^T + b_e, each row by its expert e; rows stand in the order of their experts."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, bias: bool):
        self.weight = weight_of(experts, outputs, inputs)
        self.bias = weight_of(experts, outputs) if bias else None

    def __call__(self, x: Float[Array, "m I"], rows: Int[Array, " E"]) -> Float[Array, "m O"]:
        y = jax.lax.ragged_dot_general(
            x, self.weight[...], rows, _BY_EXPERT, precision=precision_of(x)
        )
        if self.bias is None:
            return y
        return y + jnp.repeat(self.bias[...], rows, axis=0, total_repeat_length=len(x))


class ExpertStack(nnx.Module):
    """The gated feed-forward blocks of all experts."""

    def __init__(self, config: ModelConfig, experts: Experts):
        self.activation, self.how = config.activation, experts
        number, width, bias = experts.number, experts.width, experts.bias
        self.gate_up = ExpertLinear(number, config.width, 2 * width, bias=bias)
        self.down = ExpertLinear(number, width, config.width, bias=bias)

    def __call__(self, x: Float[Array, "m D"], rows: Int[Array, " E"]) -> Float[Array, "m D"]:
        return self.down(self._gated(self.gate_up(x, rows)), rows)

    def _gated(self, gate_up: Float[Array, "m _"]) -> Float[Array, "m F"]:
        clamp = self.how.clamp
        if clamp is None:
            return gated(self.activation, gate_up)
        return clamped(gate_up, clamp, self.how.sharpness)


class Router(nnx.Module):
    """Which experts a token goes through, and with which weights."""

    def __init__(self, config: ModelConfig, experts: Experts):
        self.how = experts
        self.weight = weight_of(experts.number, config.width)
        self.bias = weight_of(experts.number) if experts.bias else None
        self.correction = weight_of(experts.number) if experts.corrected else None

    def __call__(
        self, x: Float[Array, "n D"]
    ) -> tuple[Float[Array, "n chosen"], Int[Array, "n chosen"]]:
        how = self.how
        logits = jnp.einsum(
            "nd,ed->ne",
            x,
            self.weight[...],
            precision=precision_of(x),
            preferred_element_type=jnp.float32,
        )
        if self.bias is not None:
            logits = logits + self.bias[...].astype(jnp.float32)[None]
        scores = jax.nn.softmax(logits) if how.scores == "softmax" else jax.nn.sigmoid(logits)
        _, chosen = jax.lax.top_k(self._choice(scores), how.chosen)
        weights = jnp.take_along_axis(scores, chosen, axis=1)
        if how.normalized:
            weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-20)
        return weights * how.scale, chosen

    def _choice(self, scores: Float[Array, "n E"]) -> Float[Array, "n E"]:
        """What experts are chosen by: those of the groups with the best ones, corrected."""
        how = self.how
        if self.correction is not None:
            scores = scores + self.correction[...].astype(jnp.float32)[None]
        if how.groups == 1:
            return scores
        grouped = scores.reshape(len(scores), how.groups, -1)
        best = jax.lax.top_k(grouped, how.best_of_group)[0].sum(-1)
        _, taken = jax.lax.top_k(best, how.chosen_groups)
        is_taken = jax.nn.one_hot(taken, how.groups, dtype=bool).any(1)
        return jnp.where(is_taken[..., None], grouped, -jnp.inf).reshape(scores.shape)


class ExpertMLP(nnx.Module):
    """The sum of a token's experts by their weights, and of the shared one where there is one."""

    def __init__(self, config: ModelConfig):
        experts = config.experts
        assert experts is not None
        self.router = Router(config, experts)
        self.experts = ExpertStack(config, experts)
        shared = experts.shared_width
        self.shared = MLP(config, shared) if shared else None
        self.shared_gate = Linear(config.width, 1) if experts.shared_gate else None

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(rows)
        expert, k = chosen.reshape(-1), chosen.shape[1]
        order = jnp.argsort(expert)
        count = jnp.bincount(expert, length=self.router.how.number)
        out = self.experts(rows[order // k], count.astype(jnp.int32))
        out = out.astype(jnp.float32) * weights.reshape(-1)[order][:, None]
        back = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
        mixed = back.reshape(len(rows), k, -1).sum(1).astype(x.dtype)
        if self.shared is not None:
            mixed = mixed + self._shared(rows)
        return mixed.reshape(x.shape)

    def _shared(self, rows: Float[Array, "n D"]) -> Float[Array, "n D"]:
        assert self.shared is not None
        if self.shared_gate is None:
            return self.shared(rows)
        return jax.nn.sigmoid(self.shared_gate(rows)) * self.shared(rows)
