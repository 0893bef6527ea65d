"""What learning and tuning take on a CPU, before they are begun."""

import time
from datetime import timedelta

import jax
import jax.numpy as jnp

from jkvq.models.config import ModelConfig
from jkvq.models.decoder import abstract_params
from jkvq.support.errors import UserError

LIMIT = 3600.0  # seconds
_SIZE = 1024  # of the product that is timed


def require_time(work: str, operations: float, instead: str) -> None:
    """Refuses to work for hours on a CPU; ``instead`` is what would take less."""
    if jax.default_backend() != "cpu":
        return
    took = operations / _rate()
    if took > LIMIT:
        raise UserError(
            f"{work} would take about {timedelta(seconds=round(took))} on this CPU: do it on a "
            f"GPU, or with {instead}"
        )


def operations(config: ModelConfig, window: int) -> float:
    """Of a window through the model: products with weights, and of queries with keys and values."""
    layers = abstract_params(config, jnp.float32)["layers"]
    weights = sum(leaf.size for leaf in jax.tree.leaves(layers)) + config.vocab * config.width
    # Half of the tokens on average, as they are and as coded
    attention = 2 * config.layers * config.heads * config.head_dim * window
    return 2.0 * window * (weights + attention)


def _rate() -> float:
    """Operations a second of this CPU, in a product that it is good at."""
    x = jnp.ones((_SIZE, _SIZE))
    multiply = jax.jit(jnp.matmul)
    multiply(x, x).block_until_ready()
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        multiply(x, x).block_until_ready()
        times.append(time.perf_counter() - begun)
    return 2.0 * _SIZE**3 / min(times)
