"""What a model computes in, and whether its weights fit in there."""

import jax
import jax.numpy as jnp
import numpy as np

from jkvq.pallas_kernels.settings import compute_capability
from jkvq.support.arguments import refusal
from jkvq.support.errors import UserError, nearest
from jkvq.support.progress import note

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


DTypeLike = str | type | np.dtype  # a name, or JAX's own


def compute_dtype(dtype: DTypeLike | None):
    """The dtype of this name, or the one this device computes fastest in."""
    if dtype is None:  # CPUs emulate bfloat16
        dtype = "float32" if jax.default_backend() == "cpu" else half_dtype()
        if dtype == "float16":
            kind = jax.devices()[0].device_kind
            note(f"{kind} has no bfloat16: computing in float16, with attention in plain JAX")
    try:
        name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    except TypeError:
        raise refusal("dtype", dtype, f"allowed: {', '.join(_DTYPES)}") from None
    if name not in _DTYPES:
        raise UserError(f"dtype '{name}' is not known: {nearest(name, _DTYPES)}")
    return _DTYPES[name]


def half_dtype() -> str:
    """The 16-bit floats that this device computes in: NVIDIA's have bfloat16 from 8.0 on."""
    return "float16" if 0 < compute_capability() < 8 else "bfloat16"


def require_range(params, dtype):
    """The parameters; refuses numbers that float16 could not hold."""
    if dtype != jnp.float16:
        return params
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if bool(jnp.isinf(leaf).any()):
            name = ".".join(str(key.key) for key in path)
            raise UserError(
                f"'{name}' holds numbers beyond {float(jnp.finfo(dtype).max):,.0f}, the greatest "
                "of float16; use dtype='float32'"
            )
    return params
