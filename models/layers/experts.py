"""A feed-forward block of experts: each token goes through a few that a router chooses.

Few tokens read the matrices of their own experts alone. Many tokens choose nearly every expert:
they go through all, in plain products that read each matrix once, and those not chosen count
nothing. `jax.lax.ragged_dot` saves nothing there: on GPUs and CPUs XLA takes every row through
every expert, and a token has a row for each expert that it chose.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jkvq.models.config import Experts, ModelConfig
from jkvq.models.layers.linear import Linear, precision_of, weight_of
from jkvq.models.layers.mlp import MLP, clamped, gated
from jkvq.pallas_kernels.types import Unsummed


class ExpertLinear(nnx.Module):
    """y = x W_e^T + b_e of experts e."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, bias: bool):
        self.weight = weight_of(experts, outputs, inputs)
        self.bias = weight_of(experts, outputs) if bias else None

    def of_chosen(self, x: Float[Array, "m I"], expert: Int[Array, " m"]) -> Float[Array, "m O"]:
        """Each row by its expert; XLA reads the chosen matrices where they lie, in one pass."""
        y = (self.weight[...][expert].astype(jnp.float32) * x.astype(jnp.float32)[:, None]).sum(-1)
        y = y.astype(x.dtype)
        return y if self.bias is None else y + self.bias[...][expert]

    def of_all(self, x: Float[Array, "n I"] | Float[Array, "E n I"]) -> Float[Array, "E n O"]:
        """Every row by every expert; each may have rows of its own."""
        rows = "ni" if x.ndim == 2 else "eni"
        y = jnp.einsum(f"{rows},eoi->eno", x, self.weight[...], precision=precision_of(x))
        return y if self.bias is None else y + self.bias[...][:, None]


class ExpertStack(nnx.Module):
    """The gated feed-forward blocks of all experts."""

    def __init__(self, config: ModelConfig, experts: Experts):
        self.activation, self.how = config.activation, experts
        number, width, bias = experts.number, experts.width, experts.bias
        self.gate_up = ExpertLinear(number, config.width, 2 * width, bias=bias)
        self.down = ExpertLinear(number, width, config.width, bias=bias)

    def __call__(
        self,
        x: Float[Array, "n D"],
        weights: Float[Array, "n chosen"],
        chosen: Int[Array, "n chosen"],
    ) -> Float[Array, "n D"]:
        """The sum of each row's experts by their weights."""
        few = chosen.size < self.how.number
        mixed = self._of_chosen if few else self._of_all
        return mixed(x, weights, chosen).astype(x.dtype)

    def _of_chosen(self, x, weights, chosen) -> Float[Array, "n D"]:
        expert, k = chosen.reshape(-1), chosen.shape[1]
        hidden = self._gated(self.gate_up.of_chosen(jnp.repeat(x, k, axis=0), expert))
        out = self.down.of_chosen(hidden, expert).astype(jnp.float32)
        return (out.reshape(*chosen.shape, -1) * weights[..., None]).sum(1)

    def _of_all(self, x, weights, chosen) -> Float[Array, "n D"]:
        out = self.down.of_all(self._gated(self.gate_up.of_all(x))).astype(jnp.float32)
        one = jax.nn.one_hot(chosen, self.how.number, axis=0)  # [E, n, chosen]
        share = (one * weights[None]).sum(-1)[..., None]
        return jnp.where(share == 0, 0.0, out * share).sum(0)  # others may be infinite

    def _gated(self, gate_up: Float[Array, "*rows _"]) -> Float[Array, "*rows F"]:
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

    def __call__(self, x: Float[Array, "B T D"]) -> Unsummed:
        """What the block adds."""
        rows = x.reshape(-1, x.shape[-1])
        mixed = self.experts(rows, *self.router(rows))
        if self.shared is not None:
            mixed = mixed + self._shared(rows)
        return Unsummed.of(mixed.reshape(x.shape))

    def _shared(self, rows: Float[Array, "n D"]) -> Float[Array, "n D"]:
        assert self.shared is not None
        added = self.shared(rows).total
        if self.shared_gate is None:
            return added
        return jax.nn.sigmoid(self.shared_gate(rows)) * added
