"""A name for the weights of a model, the same in float32 and bfloat16 and in every file format.

Float16 rounds otherwise, so that weights in it have a name of their own.
"""

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params
from jkvq.models.joined import split_layer

_SAMPLES = 1024  # of each parameter


def fingerprint(config: ModelConfig, params: Params) -> str:
    """sha256 over every parameter's name, shape and a sample of its values in bfloat16.

    They are those of a checkpoint: how the decoder joins them makes no difference.
    """
    digest = hashlib.sha256()
    for path, leaf in _as_in_checkpoint(config, params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape}\n".encode())
        digest.update(np.asarray(_sample(leaf)).tobytes())
    return digest.hexdigest()


def _as_in_checkpoint(config: ModelConfig, params: Params) -> Iterator[tuple[Any, jax.Array]]:
    """Every parameter and its path, a layer at a time."""
    for name in sorted(params):
        if name != "layers":
            yield from jax.tree.leaves_with_path({name: params[name]})
            continue
        for number, layer in sorted(params["layers"].items()):
            split = {"layers": {number: split_layer(config.layer(number), layer)}}
            yield from jax.tree.leaves_with_path(split)


@functools.partial(jax.jit)
def _sample(leaf: jax.Array) -> jax.Array:
    flat = leaf.reshape(-1)
    step = max(1, flat.size // _SAMPLES)
    return jax.lax.bitcast_convert_type(flat[::step].astype(jnp.bfloat16), jnp.uint16)
