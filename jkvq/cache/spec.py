"""The cache spec: every way of storing keys and values is a value of one frozen dataclass.

A user writes a spec as text, a preset's name with optional overrides: ``saw-int4`` or
``jkvq-int2,page=128,value.bits=3,exact_layers=0+1``.
"""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from jkvq.cache.page_rule import PageRule
from jkvq.pallas_kernels.formats.digits import MAX_BITS, PARTS
from jkvq.pallas_kernels.formats.packing import packed_words
from jkvq.support.errors import UserError, nearest

CALIBRATED_ROTATIONS = ("balanced", "oscar", "hessian")
ROTATIONS = (
    *("none", "bdr16", "bdr32", "bdr64", "bdr128", "saw", "hadamard", "random"),
    *CALIBRATED_ROTATIONS,
)
_BITS = {"float": (16, 32), "affine": (2, 3, 4, 8), "lloyd": (1, 2, 3, 4, 5, 6, 7, 8)}


@dataclass(frozen=True)
class SideSpec:
    """How one side of the cache, keys or values, is stored.

    bits: per code; for the codec "float" 16 is bfloat16 and 32 float32.
    codec: "float"; "affine" (scale and lo for each group); "lloyd" (norm and Lloyd-Max levels).
    group: channels that share a scale and lo; None is the whole head.
    center: subtract the mean of a calibration text; that of keys turns with their page's position.
    rotation: of the channels of a head. "bdr16" ... "bdr128" are block Hadamard; "saw" is that of
        the largest order up to 128, "hadamard" that of the whole head, "random" a seeded one;
        "balanced", "oscar" and "hessian" come from calibration; "balanced" also stretches and
        shrinks directions, which queries or the output projection make good.
    clip: the quantile of a head's magnitudes at which they are clamped; 1 is off.
    step: "min-max" levels (Lloyd-Max ones: by the norm), or a step "fitted" to each group and
        stretched.
    centroids: code the difference to the nearest of so many k-means centroids; 0 is off.
    allocation: "uniform" widths, or more bits for the rotary "blocks" that matter more.
    digits: codes that each quarter of the channels gets, strongest first, such as (2, 1, 1, 0): the
        first is stored in twice the bits, the last not at all. () is one each.
    """

    bits: int
    codec: Literal["float", "affine", "lloyd"] = "affine"
    group: int | None = None
    center: bool = False
    rotation: str = "none"
    clip: float = 1.0
    step: Literal["min-max", "fitted"] = "min-max"
    centroids: int = 0
    allocation: Literal["uniform", "blocks"] = "uniform"
    digits: tuple[int, ...] = ()

    def __post_init__(self):
        def require(good: bool, name: str, allowed: object):
            if not good:
                raise UserError(f"{name}={getattr(self, name)}: allowed: {allowed}")

        require(self.codec in _BITS, "codec", ", ".join(_BITS))
        allowed = ", ".join(map(str, _BITS[self.codec]))
        require(self.bits in _BITS[self.codec], "bits", f"{allowed} for codec {self.codec}")
        require(self.rotation in ROTATIONS, "rotation", ", ".join(ROTATIONS))
        require(0.5 <= self.clip <= 1, "clip", "0.5 to 1 (off)")
        require(self.group is None or self.group >= 32, "group", "32 or more, or none")
        require(self.step in ("min-max", "fitted"), "step", "min-max, fitted")
        require(0 <= self.centroids <= 65536, "centroids", "0 (off) to 65536")
        require(self.allocation in ("uniform", "blocks"), "allocation", "uniform, blocks")
        affine = self.codec == "affine"
        require(affine or self.group is None, "group", "only with codec affine")
        require(affine or self.clip == 1, "clip", "only with codec affine")
        coded = self.codec != "float"
        require(coded or self.step == "min-max", "step", "only with codec affine or lloyd")
        require(affine or self.centroids == 0, "centroids", "only with codec affine")
        held = self.center and self.centroids > 0
        require(not held, "center", "false with centroids, which hold the mean")
        blocks = self.allocation == "blocks"
        require(self.codec == "lloyd" or not blocks, "allocation", "blocks only with codec lloyd")
        require(not blocks or self.rotation == "random", "rotation", "random with blocks")
        if self.digits:
            whole = len(self.digits) == sum(self.digits) == PARTS and min(self.digits) >= 0
            require(whole, "digits", f"{PARTS} numbers that add up to {PARTS}, such as 2+1+1+0")
            fit = self.bits * max(self.digits) <= MAX_BITS
            require(fit, "digits", f"up to {MAX_BITS} bits in all; or digits=none")
            kind = affine and self.step == "fitted" and self.rotation == "balanced"
            plain = self.group is None and self.clip == 1 and self.centroids == 0
            allowed = "rotation=balanced and step=fitted, without group, clip and centroids"
            require(kind and plain, "digits", f"only with {allowed}; or digits=none")

    @property
    def calibrated(self) -> bool:
        """Whether it needs a calibration."""
        needs = (self.rotation in CALIBRATED_ROTATIONS, self.center, self.centroids > 0)
        return any(needs) or self.allocation == "blocks"


EXACT = SideSpec(bits=16, codec="float")


@dataclass(frozen=True)
class CacheSpec(PageRule):
    """How a KV cache is stored.

    sink, recent: the first and the most recent tokens, which stay in 16 bits. Older ones are packed
        a page at a time, so that up to a page more than ``recent`` stay exact.
    page: tokens per page, a power of two. Pages are the unit in which memory is handed out.
    exact_layers: layers that are stored in 16 bits.
    """

    key: SideSpec
    value: SideSpec
    sink: int = 0
    recent: int = 0
    page: int = 64
    exact_layers: tuple[int, ...] = ()

    def __post_init__(self):
        if not (8 <= self.page <= 1024 and self.page.bit_count() == 1):
            raise UserError(
                f"page={self.page}: tokens per page, a power of two from 8 to 1024; 64 is usual"
            )
        if self.sink < 0 or self.recent < 0 or (self.sink > 0 and self.recent == 0):
            raise UserError(f"sink={self.sink}, recent={self.recent}: both 0, or recent at least 1")
        if self.value.allocation == "blocks":
            raise UserError("value.allocation=blocks: only keys have rotary blocks")
        if self.value.digits:
            raise UserError("value.digits: values have one each; give key.digits alone")

    def of_layer(self, layer: int) -> "CacheSpec":
        """The spec of one layer."""
        return self.exact if layer in self.exact_layers else self.without_exact_layers

    @property
    def exact(self) -> "CacheSpec":
        """The spec of the exact layers."""
        return CacheSpec(EXACT, EXACT, page=self.page)

    @property
    def without_exact_layers(self) -> "CacheSpec":
        return dataclasses.replace(self, exact_layers=())

    def check(self, layers: int, head_dim: int, context: int) -> None:
        """Refuses a spec that a model of these sizes cannot have."""
        if self.sink + self.recent > context:
            raise UserError(
                f"sink={self.sink}, recent={self.recent}: together at most the context of {context}"
            )
        for layer in self.exact_layers:
            if not 0 <= layer < layers:
                raise UserError(f"exact_layers={layer}: this model has layers 0 to {layers - 1}")
        for name, side in (("key", self.key), ("value", self.value)):
            _check_side(name, side, head_dim)


def _check_side(name: str, side: SideSpec, head_dim: int) -> None:
    def refuse(what: str, use: str):
        raise UserError(f"head_dim={head_dim}: {name} {what}; use {use}")

    if side.rotation.startswith("bdr") and head_dim % int(side.rotation[3:]):
        refuse(f"rotation {side.rotation} needs a multiple of {side.rotation[3:]}", "rotation=saw")
    if side.rotation in ("hadamard", "balanced", "oscar") and head_dim.bit_count() != 1:
        refuse(f"rotation {side.rotation} needs a power of two", "rotation=none or saw")
    if head_dim % (side.group or head_dim):
        refuse(f"group {side.group} does not divide it", "a group that does")
    if side.codec != "float":
        try:
            packed_words(head_dim, side.bits)
        except ValueError as error:
            refuse(f"bits={side.bits}: {error}", f"{name}.bits=4")


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


def _flag(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _optional(text: str) -> int | None:
    return None if text == "none" else int(text)


def _digits(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(map(int, text.split("+")))


def _layers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(layer) for layer in text.split("+")}))


# What a string may override, and how each is read. A side's field stands for both sides unless it
# begins with "key." or "value.".
_CACHE_FIELDS: dict[str, Callable[[str], Any]] = {
    "page": int,
    "sink": int,
    "recent": int,
    "exact_layers": _layers,
}
_SIDE_FIELDS: dict[str, Callable[[str], Any]] = {
    "bits": int,
    "group": _optional,
    "center": _flag,
    "rotation": str,
    "clip": float,
    "step": str,
    "digits": _digits,
}


def parse_spec(text: str) -> CacheSpec:
    """The spec that ``text`` names, such as ``saw-int4`` or ``saw-int4,page=128``."""
    name, *overrides = (part.strip() for part in text.split(","))
    if name in EVALUATED_ONLY:
        raise UserError(
            f"cache '{name}' exists in `jkvq eval ppl` and `jkvq eval fidelity` only, as a "
            "baseline: choose one that `jkvq methods` lists, such as oscar-int2"
        )
    if name not in PRESETS:
        raise UserError(f"cache '{name}' is not known: {nearest(name, PRESETS)}")
    changes: dict[str, dict[str, Any]] = {"": {}, "key": {}, "value": {}}
    for override in overrides:
        match = re.fullmatch(r"(?:(key|value)\.)?(\w+)=(.+)", override)
        side, field, value = match.groups() if match else (None, "", "")
        readers = _SIDE_FIELDS if side else _CACHE_FIELDS | _SIDE_FIELDS
        if field not in readers:
            allowed = ", ".join([*_CACHE_FIELDS, *_SIDE_FIELDS])
            raise UserError(
                f"cache '{text}': '{override}' is no override; allowed are NAME=VALUE of {allowed}"
            )
        try:
            read = readers[field](value)
        except (ValueError, KeyError):
            raise UserError(f"cache '{text}': {field}={value} cannot be read") from None
        sides = [side] if side else ["key", "value"] if field in _SIDE_FIELDS else [""]
        for place in sides:
            changes[place][field] = read
    spec = PRESETS[name].spec
    return dataclasses.replace(
        spec,
        key=dataclasses.replace(spec.key, **changes["key"]),
        value=dataclasses.replace(spec.value, **changes["value"]),
        **changes[""],
    )


def spec_text(spec: CacheSpec) -> str:
    """The shortest text that `parse_spec` reads as this spec; its fields where there is none."""
    texts = (_overridden(name, preset.spec, spec) for name, preset in PRESETS.items())
    return min((text for text in texts if text is not None), key=len, default=str(spec))


def _overridden(name: str, preset: CacheSpec, wanted: CacheSpec) -> str | None:
    """The preset with the overrides that make it ``wanted``; None if there are none."""

    def changes(old: Any, new: Any, fields) -> dict[str, str]:
        return {
            field: _written(getattr(new, field))
            for field in fields
            if getattr(new, field) != getattr(old, field)
        }

    key, value = (
        changes(getattr(preset, side), getattr(wanted, side), _SIDE_FIELDS)
        for side in ("key", "value")
    )
    both = dict(key.items() & value.items())
    overrides = changes(preset, wanted, _CACHE_FIELDS) | both
    for side, found in (("key", key), ("value", value)):
        overrides |= {f"{side}.{field}": found[field] for field in found if field not in both}
    text = ",".join([name, *(f"{field}={overrides[field]}" for field in sorted(overrides))])
    try:
        return text if parse_spec(text) == wanted else None
    except UserError:  # these fields do not go together
        return None


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    return str(value).lower()


def split_names(text: str) -> list[str]:
    """The caches of a list like ``bf16,int4,page=128``: a part with ``=`` belongs to its left."""
    names: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if "=" in part and names:
            names[-1] += f",{part}"
        else:
            names.append(part)
    return list(dict.fromkeys(names))
