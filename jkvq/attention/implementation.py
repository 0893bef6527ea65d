"""Which implementation of the cache's ops runs a model: the GPU kernels or plain JAX."""

from typing import get_args

from jkvq.cache.specs.spec import CacheSpec, SideSpec
from jkvq.models.config import ModelConfig
from jkvq.pallas_kernels.settings import ROWS, compute_capability, has_gpu, is_hopper
from jkvq.pallas_kernels.types import COMPILED, Implementation
from jkvq.support.errors import UserError, nearest

_HEAD_DIMS = (64, 128, 256)
_SHORTEST_PAGE = 16
_WIDEST_LLOYD = 4
_SIDES = ("key", "value")


def choose_implementation(name: str | None, config: ModelConfig, spec: CacheSpec) -> Implementation:
    """The implementation called ``name``, or the best here; refuses one that cannot serve."""
    require_known(name)
    limit = None if name == "reference" else model_limit(config, spec)
    if name is None:
        return "pallas" if has_gpu() and limit is None else "reference"
    if limit is not None:
        raise UserError(f"implementation {name}: {limit}; use reference")
    limit = device_limit() if name in COMPILED else None
    if limit is not None:
        raise UserError(f"implementation {name}: {limit}; use reference")
    if name == "mosaic" and not is_hopper():
        raise UserError(
            "implementation mosaic: it runs on GPUs of compute capability 9.0 (H100, H200), and "
            f"this one has {compute_capability()}; use triton"
        )
    return name  # pyright: ignore[reportReturnType]


def require_known(name: str | None) -> None:
    """Refuses what is no implementation's name."""
    names = get_args(Implementation)
    if name is not None and name not in names:
        raise UserError(f"implementation '{name}' is not known: {nearest(str(name), names)}")


def device_limit() -> str | None:
    """Why the kernels cannot run compiled on this device; None if they can."""
    if has_gpu():
        return None
    found = compute_capability()
    here = f"this one has {found}" if found else "there is none here"
    return f"the kernels need an NVIDIA GPU of compute capability 8 or more, and {here}"


def model_limit(config: ModelConfig, spec: CacheSpec) -> str | None:
    """What the kernels cannot do of a model and its cache."""
    return _architecture_limit(config) or _spec_limit(spec)


def _architecture_limit(config: ModelConfig) -> str | None:
    if config.latent is not None:
        return "the kernels read keys and values, and this model keeps latents (MLA)"
    if config.head_dim not in _HEAD_DIMS:
        allowed = ", ".join(map(str, _HEAD_DIMS))
        return f"the kernels take heads of {allowed} channels, and this model has {config.head_dim}"
    if config.head_dim == 256 and 0 < compute_capability() < 9:
        return "on GPUs of compute capability below 9 cuDNN takes heads of 64 and 128 channels only"
    if config.heads > ROWS * config.kv_heads:
        groups = config.heads // config.kv_heads
        return f"the kernels take up to {ROWS} query heads per KV head, and this model has {groups}"
    return None


def _spec_limit(spec: CacheSpec) -> str | None:
    if spec.page < _SHORTEST_PAGE:
        return f"the kernels take pages of {_SHORTEST_PAGE} tokens or more, and page={spec.page}"
    sides = ((name, getattr(own, name)) for own in (spec, *spec.other_layers) for name in _SIDES)
    return next(filter(None, (_side_limit(*side) for side in sides)), None)


def _side_limit(name: str, side: SideSpec) -> str | None:
    if side.codec == "float" and side.bits == 32:
        return f"the kernels take 16-bit floats, and {name}.bits=32"
    lloyd = side.codec == "lloyd" and side.allocation == "uniform"
    if lloyd and side.bits > _WIDEST_LLOYD:
        most = _WIDEST_LLOYD
        return f"the kernels take Lloyd codes of up to {most} bits, and {name}.bits={side.bits}"
    return None
