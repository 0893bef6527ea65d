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
_OF_SCORE, _OF_CODE = 2e3, 1.2e4  # as timed on two cores


def require_time(work: str, operations: float, otherwise: str) -> None:
    """Refuses to work for hours on a CPU, and says what else could be done."""
    if jax.default_backend() != "cpu":
        return
    took = operations / _rate()
    if took > LIMIT:
        raise UserError(
            f"{work} would take about {timedelta(seconds=round(took))} on this CPU: do it on a "
            f"GPU, or {otherwise}"
        )


def operations(config: ModelConfig, window: int) -> float:
    """Of a window through the model: products with weights, and of queries with keys and values."""
    layers = abstract_params(config, jnp.float32)["layers"]
    weights = sum(leaf.size for leaf in jax.tree.leaves(layers)) + config.vocab * config.width
    # Half of the tokens on average, as they are and as coded
    attention = 2 * config.layers * config.heads * config.head_dim * window
    return 2.0 * window * (weights + attention)


def layer_operations(config: ModelConfig, window: int, queries: int) -> float:
    """Of a step of a layer by itself, in products that would take as long.

    What is done to each score and each code, there and back, takes longer than the products.
    """
    scores = 2 * queries * window * config.heads  # tokens as they are, and as coded
    codes = 2 * window * config.kv_heads * config.head_dim
    return _OF_SCORE * scores + _OF_CODE * codes


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
