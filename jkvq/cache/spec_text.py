"""A cache as users write it: a preset's name with optional overrides.

``saw-int4`` or ``jkvq-int2,page=128,value.bits=3,exact_layers=0+1``.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from jkvq.cache.presets import EVALUATED_ONLY, PRESETS
from jkvq.cache.spec import CacheSpec
from jkvq.support.errors import UserError, nearest


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
