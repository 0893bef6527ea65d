"""The caches that have a name: published methods, ours, and the plain ones they are compared with.

A new one is an entry in one of the functions below: `jkvq caches` then lists it, and the tests of
formats and kernels run it.
"""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jkvq.cache.specs.spec import EXACT, CacheSpec, SideSpec

# Baselines that only the evaluation has (jkvq/evaluation/baselines.py): nothing runs on them.
EVALUATED_ONLY = ("kivi-int2", "kivi-int4", "kitty-int2", "kitty25-int2")
_WINDOWS: dict[str, Any] = {"sink": 64, "recent": 256}  # as OSCAR has them


@dataclass(frozen=True)
class Preset:
    """A spec under a name, with one line about it."""

    spec: CacheSpec
    about: str


_Named = Iterator[tuple[str, Preset]]


def _both(side: SideSpec, **fields: Any) -> CacheSpec:
    """A cache that stores keys and values alike."""
    return CacheSpec(side, side, **fields)


def _affine(bits: int, **fields: Any) -> SideSpec:
    return SideSpec(bits, "affine", **fields)


def _plain() -> _Named:
    """No rotation, no calibration."""
    yield "bf16", Preset(_both(EXACT), "bfloat16 keys and values: the 16-bit baseline")
    yield "f32", Preset(_both(SideSpec(32, "float")), "float32: nothing rounded, for comparisons")
    for bits in (8, 4, 3, 2):
        yield f"int{bits}", Preset(_both(_affine(bits)), "token-wise affine, no rotation")


def _saw() -> _Named:
    """SAW-INT4 and its variants: int4 behind block Hadamard, Hessian rotations or k-means."""
    int4, saw = _affine(4), _affine(4, rotation="saw")
    for order in (16, 32, 64, 128):
        key = _affine(4, rotation=f"bdr{order}")
        about = f"int4 with block Hadamard of order {order} on"
        yield f"bdr{order}-k", Preset(CacheSpec(key, int4), f"{about} keys")
        yield f"bdr{order}-kv", Preset(_both(key), f"{about} keys and values")
    yield "saw-int4", Preset(CacheSpec(saw, int4), "SAW-INT4: block Hadamard on keys")
    hessian = _affine(4, rotation="hessian")
    yield "hessian-int4", Preset(CacheSpec(hessian, int4), "SAW-INT4's Hessian rotation of keys")
    for count in (16, 256, 2048):
        value = _affine(4, centroids=count)
        key = dataclasses.replace(value, rotation="saw")
        about = f"int4 of the difference to one of {count} centroids"
        yield f"kmeans{count}-int4", Preset(_both(value), about)
        yield (
            f"kmeans{count}-bdr-int4",
            Preset(CacheSpec(key, value), f"{about}, block Hadamard on keys"),
        )


def _quarot() -> _Named:
    about = "QuaRot: Hadamard on keys and values"
    int4, int2 = (_affine(bits, rotation="hadamard") for bits in (4, 2))
    yield "quarot-int4", Preset(_both(int4), about)
    yield "quarot-int2", Preset(_both(int2, **_WINDOWS), f"{about}, 16-bit windows")


def _oscar() -> _Named:
    about = "OSCAR: attention-aware rotation, clip, windows"
    for bits in (4, 3, 2):
        key, value = (_affine(bits, rotation="oscar", clip=clip) for clip in (0.96, 0.92))
        yield f"oscar-int{bits}", Preset(CacheSpec(key, value, **_WINDOWS), about)


def _jkvq() -> _Named:
    about = "ours: centring, balanced rotation, fitted step, windows"
    for bits in (4, 3, 2):
        value = _affine(bits, rotation="balanced", center=True, step="fitted")
        key, more = value, ""
        if bits == 2:
            key, more = dataclasses.replace(value, digits=(2, 1, 1, 0)), ", unequal key widths"
        spec = CacheSpec(key, value, sink=64, recent=64 if bits == 4 else 256)
        yield f"jkvq-int{bits}", Preset(spec, about + more)
        if bits == 2:
            wide = dataclasses.replace(spec, recent=704, window_bits=8)
            more = ": jkvq-int2 with wider windows in 8 bits, for the same bits"
            yield "jkvq-int2-w8", Preset(wide, f"ours{more}")


def _lloyd(key_bits: int, value_bits: int) -> tuple[SideSpec, SideSpec]:
    key, value = (SideSpec(bits, "lloyd", rotation="random") for bits in (key_bits, value_bits))
    return key, value


def _turboquant() -> _Named:
    for bits in ((4, 4), (3, 3), (3, 2), (2, 2)):
        spec = CacheSpec(*_lloyd(*bits))
        yield "tq-k{}v{}".format(*bits), Preset(spec, "TurboQuant-MSE: norm and Lloyd-Max")


def _blockgtq() -> _Named:
    about = "Block-GTQ: key bits by rotary block"
    for bits in ((3, 3), (3, 2), (2, 2)):
        name = "blockgtq-k{}v{}".format(*bits)
        key, value = _lloyd(*bits)
        spec = CacheSpec(dataclasses.replace(key, allocation="blocks"), value)
        protected = dataclasses.replace(spec, sink=4, recent=128)
        yield name, Preset(spec, about)
        yield f"{name}-protected", Preset(protected, f"{about}, 4 + 128 exact")


PRESETS = {
    name: preset
    for family in (_plain, _saw, _quarot, _oscar, _jkvq, _turboquant, _blockgtq)
    for name, preset in family()
}


def families() -> list[str]:
    """The presets in a few words: ``jkvq*`` stands for all whose names begin so."""
    alike: dict[str, list[str]] = {}
    for name in PRESETS:
        alike.setdefault(re.split(r"[^a-z]", name)[0], []).append(name)
    return [f"{start}*" if names[1:] else names[0] for start, names in alike.items()]
