"""A name for the weights of a model, the same in float32 and bfloat16 and in every file format.

Float16 rounds otherwise, so that weights in it have a name of their own.
"""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from jkvq.models.decoder import Params

_SAMPLES = 1024  # of each parameter


def fingerprint(params: Params) -> str:
    """sha256 over every parameter's name, shape and a sample of its values in bfloat16."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape}\n".encode())
        digest.update(np.asarray(_sample(leaf)).tobytes())
    return digest.hexdigest()


@functools.partial(jax.jit)
def _sample(leaf: jax.Array) -> jax.Array:
    flat = leaf.reshape(-1)
    step = max(1, flat.size // _SAMPLES)
    return jax.lax.bitcast_convert_type(flat[::step].astype(jnp.bfloat16), jnp.uint16)
