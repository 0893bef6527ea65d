"""A model together with the cache it runs with."""

from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp

from jkvq.errors import UserError, nearest
from jkvq.memory import format_bytes, free_bytes
from jkvq.models.checkpoint import Checkpoint, open_checkpoint
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params, abstract_params
from jkvq.models.tokenizer import Tokenizer
from jkvq.spec import CacheSpec, parse_spec

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_CACHE = "bf16"
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True)
class LLM:
    """A model ready to run.

    pool_tokens: the most tokens that one call may keep in the cache; None leaves it to the free
        memory.
    """

    name: str
    config: ModelConfig
    params: Params = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)
    spec: CacheSpec
    pool_tokens: int | None = None


def load(
    model: str | Path = DEFAULT_MODEL,
    *,
    cache: str | CacheSpec = DEFAULT_CACHE,
    dtype: str | None = None,
    pool_tokens: int | None = None,
) -> LLM:
    """Loads a model.

    Args:
        model: a short name (``smollm2-135m``), a folder, a ``.gguf`` file or a hub id.
        cache: how keys and values are stored; `jkvq methods` lists the names.
        dtype: ``float32`` or ``bfloat16``; by default what the device computes fastest in.
        pool_tokens: the most tokens that one call may keep in the cache.
    """
    spec = parse_spec(cache) if isinstance(cache, str) else cache
    if pool_tokens is not None and pool_tokens < 1:
        raise UserError(f"pool_tokens={pool_tokens}: at least 1 is needed")
    compute = compute_dtype(dtype)
    checkpoint = open_checkpoint(model)
    _require_memory(checkpoint, compute)
    tokenizer = checkpoint.tokenizer()
    return LLM(
        str(model), checkpoint.config, checkpoint.params(compute), tokenizer, spec, pool_tokens
    )


def compute_dtype(name: str | None):
    """The dtype called ``name``, or the one this device computes fastest in."""
    if name is None:  # CPUs emulate bfloat16
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    if name not in _DTYPES:
        raise UserError(f"dtype '{name}' is not known: {nearest(name, _DTYPES)}")
    return _DTYPES[name]


def weight_bytes(config: ModelConfig, dtype) -> int:
    """Bytes of all parameters."""
    leaves = jax.tree.leaves(abstract_params(config, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _require_memory(checkpoint: Checkpoint, dtype) -> None:
    needed, free = weight_bytes(checkpoint.config, dtype), free_bytes()
    if free is not None and needed > free:
        advice = "; try dtype='bfloat16'" if dtype == jnp.float32 else ""
        raise UserError(
            f"the weights take {format_bytes(needed)} and {format_bytes(free)} are free{advice}"
        )
