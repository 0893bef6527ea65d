"""What the kernels run on, and how they are set up there.

Tuned settings are JSON files in ``tuned/``, one for each device, written by
``python -m scripts.tune_kernels``; an unknown device takes the defaults below.
"""

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp

from jkvq.pallas_kernels.formats.codecs import Codec, FloatCodec, LloydCodec
from jkvq.pallas_kernels.types import DecodeSettings, WriteSettings

ROWS = 16  # of a matrix product, the least a tensor core takes: query heads, filled up
_TUNED = Path(__file__).parent / "tuned"
_DEFAULTS = {
    # The backend of decode on Hopper; elsewhere it is triton.
    "backend": {
        "float": "triton",
        "windows": "mosaic",
        "packed": "mosaic",
        "stream": "triton",
    },
    "together": False,  # whether Mosaic reads windows in the launch of packed pages
    # programs per multiprocessor, warps, stages
    "decode": {
        "float": [4, 4, 2],
        "windows": [4, 4, 2],
        "packed": [8, 1, 2],
        "stream": [8, 1, 2],
    },
    # tokens, warps: of thousands of tokens, and of a few
    "write": {"many": [32, 4], "few": [16, 4]},
}
_FEW = 1024  # tokens


def compute_capability() -> float:
    """Of the first device if it is an NVIDIA GPU; 0 elsewhere (ROCm's are called gfx942)."""
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    known = device.platform == "gpu" and re.fullmatch(r"\d+\.\d+", capability)
    return float(capability) if known else 0.0


def has_gpu() -> bool:
    """Whether the kernels can run compiled here."""
    return compute_capability() >= 8


def tuned_file() -> Path:
    """Where the settings for this device stand, if there are any."""
    return _TUNED / f"{jax.devices()[0].device_kind.replace(' ', '_')}.json"


@functools.lru_cache
def _settings() -> dict:
    path = tuned_file()
    return _DEFAULTS | (json.loads(path.read_text()) if path.is_file() else {})


def _kind(codec: Codec) -> str:
    if isinstance(codec, FloatCodec):
        return "windows" if codec.floats == jnp.float16 else "float"
    return "stream" if isinstance(codec, LloydCodec) and codec.allocation is not None else "packed"


def is_hopper() -> bool:
    """Whether Mosaic's kernels can run here."""
    return compute_capability() == 9.0


def prefers_mosaic(codec: Codec) -> bool:
    """Whether ``decode`` is faster on Mosaic here, if that reads the codec."""
    return is_hopper() and _settings()["backend"][_kind(codec)] == "mosaic"


def reads_together() -> bool:
    """Whether Mosaic reads packed pages and windows in one launch here."""
    return _settings()["together"]


def decode_settings(codec: Codec) -> DecodeSettings:
    """How ``decode`` runs on Triton on this device."""
    per_core, warps, stages = _settings()["decode"][_kind(codec)]
    cores = getattr(jax.devices()[0], "core_count", None) or 1
    return DecodeSettings(per_core * cores, warps, stages)


def write_settings(tokens: int) -> WriteSettings:
    """How ``write`` runs on this device."""
    return WriteSettings(*_settings()["write"]["many" if tokens > _FEW else "few"])
