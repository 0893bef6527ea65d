"""The Fisher form of the KL, against the KL of a model whose attention misses by an error."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkvq
from jkvq.calibration.learning.fisher import fishers
from jkvq.calibration.learning.passes import Network, Windows
from jkvq.models.decoder import logits, run
from jkvq.support.progress import count_bar
from tests.calibration.learning.example import TEXT, model

T, SEQUENCES = 96, 24


@pytest.fixture(scope="module")
def example() -> tuple[Network, jax.Array]:
    own = model()
    tokens = np.asarray(own.tokenizer.encode(TEXT.text)[: T * SEQUENCES], np.int32)
    network = Network(own.config, own.params, jkvq.parse_spec("int4,page=16"))
    return network, jnp.asarray(tokens.reshape(SEQUENCES, T))


def test_it_tells_the_kl_of_errors_that_do_not_know_of_each_other(example):
    """Means over draws of errors in one layer, and of the tokens that F is made of."""
    network, tokens = example
    stand = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), tokens.shape)
    windows = [Windows(tokens, stand)] * 8  # each has draws of its own
    with count_bar("", len(windows) * network.config.layers) as bar:
        found = fishers(network, windows, 0, bar)
    config = network.config
    scale = 0.01 * np.linspace(0.2, 2, config.heads * config.head_dim, dtype=np.float32)
    for layer, fisher in enumerate(found):
        np.testing.assert_allclose(fisher, fisher.T, atol=1e-6)
        shape = (SEQUENCES, T, config.heads, config.head_dim)
        kls = []
        for seed in range(4):
            error = jax.random.normal(jax.random.key(seed), shape) * scale.reshape(1, 1, *shape[2:])
            kls.append(_kl(network, tokens, layer, error))
        expected = 0.5 * float((np.diag(fisher) * scale**2).sum())
        assert expected > 1e-6
        np.testing.assert_allclose(np.mean(kls), expected, rtol=0.1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Missing:
    """JAX's own attention, whose outputs miss by an error."""

    error: jax.Array

    def __call__(self, q, k, v, state, sinks=None):
        q, k, v = (heads.finished for heads in (q, k, v))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True) + self.error, state


def _kl(network: Network, tokens: jax.Array, layer: int, error: jax.Array) -> float:
    config, position = network.config, jnp.broadcast_to(jnp.arange(T), tokens.shape)

    def distributions(missing: int) -> np.ndarray:
        attend = {True: _Missing(error), False: _Missing(jnp.zeros_like(error))}
        how = tokens, position, lambda each: attend[each == missing], None
        last, _ = run(config, network.params, *how)
        return np.asarray(jax.nn.log_softmax(logits(config, network.ends, last)), np.float64)

    exact, found = distributions(-1), distributions(layer)
    return float((np.exp(exact) * (exact - found)).sum(-1).mean())
