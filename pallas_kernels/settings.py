"""What the kernels run on, and how they are set up there.

Tuned settings are JSON files in ``tuned/``, one for each device, written by
``python -m scripts.tune_kernels``; an unknown device takes the defaults below.
"""

import functools
import json
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from jkvq.pallas_kernels.formats.codecs import Codec, FloatCodec, LloydCodec
from jkvq.pallas_kernels.triton import decode, write

# "reference": plain JAX, in float32, on any device.
# "pallas": the kernels, on an NVIDIA GPU of compute capability 8 or more.
# "interpret": the kernels' own steps, one by one, on any device: for tests.
Implementation = Literal["reference", "pallas", "interpret"]

_TUNED = Path(__file__).parent / "tuned"
_DEFAULTS = {
    # programs per multiprocessor, warps, stages
    "decode": {
        "float": [4, 4, 2],
        "windows": [4, 4, 2],
        "packed": [8, 1, 2],
        "stream": [8, 1, 2],
    },
    # tokens, blocks, warps: of thousands of tokens, and of a few
    "write": {"many": [64, 4, 4], "few": [16, 1, 4]},
}
_FEW = 1024  # tokens


def has_gpu() -> bool:
    """Whether the kernels can run compiled here."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "0")
    return device.platform == "gpu" and float(capability) >= 8


def tuned_file() -> Path:
    """Where the settings for this device stand, if there are any."""
    return _TUNED / f"{jax.devices()[0].device_kind.replace(' ', '_')}.json"


@functools.lru_cache
def _settings() -> dict:
    path = tuned_file()
    return _DEFAULTS | (json.loads(path.read_text()) if path.is_file() else {})


def decode_config(codec: Codec) -> decode.Config:
    """How ``decode`` runs on this device."""
    kind = "packed"
    if isinstance(codec, FloatCodec):
        kind = "windows" if codec.floats == jnp.float16 else "float"
    if isinstance(codec, LloydCodec) and codec.allocation is not None:
        kind = "stream"
    per_core, warps, stages = _settings()["decode"][kind]
    cores = getattr(jax.devices()[0], "core_count", None) or 1
    return decode.Config(per_core * cores, warps, stages)


def write_config(tokens: int) -> write.Config:
    """How ``write`` runs on this device."""
    return write.Config(*_settings()["write"]["many" if tokens > _FEW else "few"])
