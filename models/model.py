"""A model as it is loaded, before it has a cache."""

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import jax.numpy as jnp

from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params, weight_bytes
from jkvq.models.dtype import DTypeLike, compute_dtype, half_dtype
from jkvq.models.fingerprint import fingerprint
from jkvq.models.formats.checkpoint import Checkpoint, open_checkpoint
from jkvq.models.tokenizer import Tokenizer
from jkvq.support.compile_cache import keep_compiled_programs
from jkvq.support.errors import UserError
from jkvq.support.memory import format_bytes, free_bytes


@dataclass(frozen=True)
class Model:
    """Weights as the checkpoint has them: what calibration, evaluation and caches start from.

    `jkvq.with_cache` makes an `LLM` of it, which can generate.
    """

    name: str
    config: ModelConfig
    params: Params = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A name for the weights, whatever dtype and file they come from."""
        return fingerprint(self.config, self.params)


def load_model(model: str | Path, *, dtype: DTypeLike | None = None) -> Model:
    """Loads a model without a cache.

    Args:
        model: a short name (``smollm2-135m``), a folder, a ``.gguf`` file or a hub id.
        dtype: ``float32``, ``bfloat16`` or ``float16``, as a name or JAX's own; by default what
            the device computes fastest in.
    """
    compute = compute_dtype(dtype)
    return read_model(str(model), open_checkpoint(model), compute)


def read_model(name: str, checkpoint: Checkpoint, dtype) -> Model:
    """The model of an open checkpoint."""
    require_memory(checkpoint.config, dtype)
    keep_compiled_programs()
    # The tokenizer's library takes seconds to import: meanwhile the weights are read.
    with ThreadPoolExecutor(1) as aside:
        tokenizer = aside.submit(checkpoint.tokenizer)
        params = checkpoint.params(dtype)
        return Model(name, checkpoint.config, params, tokenizer.result())


def require_memory(config: ModelConfig, dtype) -> None:
    """Refuses weights for which there is no room."""
    needed, free = weight_bytes(config, dtype), free_bytes()
    if free is not None and needed > free:
        advice = f"; try dtype='{half_dtype()}'" if dtype == jnp.float32 else ""
        raise UserError(
            f"the weights take {format_bytes(needed)} and {format_bytes(free)} are free{advice}"
        )
