"""The caches that have a name."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from jkvq.cache.spec import EXACT, CacheSpec, SideSpec


@dataclass(frozen=True)
class Preset:
    """A spec under a name, with one line about it."""

    spec: CacheSpec
    about: str


def _presets() -> dict[str, Preset]:
    def both(side: SideSpec, **fields: Any) -> CacheSpec:
        return CacheSpec(side, side, **fields)

    def turned(side: SideSpec, rotation: str, **fields: Any) -> SideSpec:
        return dataclasses.replace(side, rotation=rotation, **fields)

    def affine(bits: int, **fields: Any) -> SideSpec:
        return SideSpec(bits, "affine", **fields)

    windows: dict[str, Any] = {"sink": 64, "recent": 256}
    int4 = affine(4)
    found = {
        "bf16": Preset(both(EXACT), "bfloat16 keys and values: the 16-bit baseline"),
        "f32": Preset(both(SideSpec(32, "float")), "float32: nothing rounded, for comparisons"),
    }
    for bits in (8, 4, 3, 2):
        found[f"int{bits}"] = Preset(both(affine(bits)), "token-wise affine, no rotation")
    for order in (16, 32, 64, 128):
        key = turned(int4, f"bdr{order}")
        about = f"int4 with block Hadamard of order {order} on"
        found[f"bdr{order}-k"] = Preset(CacheSpec(key, int4), f"{about} keys")
        found[f"bdr{order}-kv"] = Preset(both(key), f"{about} keys and values")
    saw = turned(int4, "saw")
    found["saw-int4"] = Preset(CacheSpec(saw, int4), "SAW-INT4: block Hadamard on keys")
    found["hessian-int4"] = Preset(
        CacheSpec(turned(int4, "hessian"), int4), "SAW-INT4's Hessian rotation of keys"
    )
    for count in (16, 256, 2048):
        plain = affine(4, centroids=count)
        about = f"int4 of the difference to one of {count} centroids"
        found[f"kmeans{count}-int4"] = Preset(both(plain), about)
        found[f"kmeans{count}-bdr-int4"] = Preset(
            CacheSpec(turned(plain, "saw"), plain), f"{about}, block Hadamard on keys"
        )
    quarot = "QuaRot: Hadamard on keys and values"
    found["quarot-int4"] = Preset(both(affine(4, rotation="hadamard")), quarot)
    found["quarot-int2"] = Preset(
        both(affine(2, rotation="hadamard"), **windows), f"{quarot}, 16-bit windows"
    )
    for bits in (4, 3, 2):
        key, value = (affine(bits, rotation="oscar", clip=clip) for clip in (0.96, 0.92))
        found[f"oscar-int{bits}"] = Preset(
            CacheSpec(key, value, **windows), "OSCAR: attention-aware rotation, clip, windows"
        )
        ours = affine(bits, rotation="balanced", center=True, step="fitted")
        key = dataclasses.replace(ours, digits=(2, 1, 1, 0) if bits == 2 else ())
        found[f"jkvq-int{bits}"] = Preset(
            CacheSpec(key, ours, sink=64, recent=64 if bits == 4 else 256),
            "ours: centring, balanced rotation, fitted step, windows"
            + (", unequal key widths" if key.digits else ""),
        )
    for key_bits, value_bits in ((4, 4), (3, 3), (3, 2), (2, 2)):
        name = f"k{key_bits}v{value_bits}"
        key, value = (SideSpec(b, "lloyd", rotation="random") for b in (key_bits, value_bits))
        found[f"tq-{name}"] = Preset(CacheSpec(key, value), "TurboQuant-MSE: norm and Lloyd-Max")
        if key_bits == 4:
            continue
        blocks = dataclasses.replace(key, allocation="blocks")
        about = "Block-GTQ: key bits by rotary block"
        found[f"blockgtq-{name}"] = Preset(CacheSpec(blocks, value), about)
        found[f"blockgtq-{name}-protected"] = Preset(
            CacheSpec(blocks, value, sink=4, recent=128), f"{about}, 4 + 128 exact"
        )
    return found


PRESETS = _presets()
EVALUATED_ONLY = ("kivi-int2", "kivi-int4", "kitty-int2", "kitty25-int2")  # jkvq/baselines.py
