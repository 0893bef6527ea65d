"""A block of experts beside the same in NumPy, one token and one expert at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jkvq.models.config import Experts
from jkvq.models.layers.experts import ExpertStack
from tests.tiny import CONFIG

HOW = Experts(number=6, chosen=2, width=24, bias=True)
D, F = CONFIG.width, HOW.width


@pytest.fixture(scope="module")
def stack() -> ExpertStack:
    rng, made = np.random.default_rng(0), ExpertStack(CONFIG, HOW)
    for matrix in (made.gate_up, made.down):
        for each in (matrix.weight, matrix.bias):
            assert each is not None
            each[...] = jnp.asarray(rng.normal(0, 0.2, each.shape), jnp.float32)
    return made


def by_hand(stack: ExpertStack, x, weights, chosen) -> np.ndarray:
    """Of every token, the experts that it chose."""
    wide = jax.tree.map(np.float64, nnx.to_pure_dict(nnx.state(stack)))
    out = np.zeros(x.shape)
    for row, token in enumerate(np.asarray(x, np.float64)):
        for weight, expert in zip(weights[row], chosen[row], strict=True):
            of = {name: (m["weight"][expert], m["bias"][expert]) for name, m in wide.items()}
            gate, up = np.split(of["gate_up"][0] @ token + of["gate_up"][1], 2)
            hidden = gate / (1 + np.exp(-gate)) * up
            out[row] += weight * (of["down"][0] @ hidden + of["down"][1])
    return out


@pytest.mark.parametrize("tokens", [1, 2, 3, 9])  # up to 2 by their own experts, then by all
def test_tokens_go_through_the_experts_that_they_chose(stack, tokens):
    rng = np.random.default_rng(tokens)
    x, weights = rng.normal(size=(tokens, D)), rng.uniform(0.2, 1, (tokens, 2))
    chosen = np.stack([rng.permutation(6)[:2] for _ in range(tokens)])
    found = stack(jnp.float32(x), jnp.float32(weights), jnp.int32(chosen))
    np.testing.assert_allclose(found, by_hand(stack, x, weights, chosen), atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 9])
def test_what_was_not_chosen_counts_nothing(stack, tokens):
    chosen = jnp.tile(jnp.array([[4, 1]], jnp.int32), (tokens, 1))
    x, weights = jnp.ones((tokens, D)), jnp.full((tokens, 2), 0.5)
    before, kept = stack(x, weights, chosen), stack.down.weight[...]
    stack.down.weight[...] = kept.at[jnp.array([0, 2, 3, 5])].set(jnp.inf)
    found = stack(x, weights, chosen)
    stack.down.weight[...] = kept
    np.testing.assert_array_equal(found, before)
