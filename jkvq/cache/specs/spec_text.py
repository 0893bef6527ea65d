"""A cache as users write it: a preset's name with optional overrides.

``saw-int4`` or ``jkvq-int2,page=128,value.bits=3,exact_layers=0+1``. A field of a side may be set
in some layers alone: ``jkvq-int2,value.bits=4@0+3-5``.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from jkvq.cache.specs.kept_names import kept_name, kept_names
from jkvq.cache.specs.presets import EVALUATED_ONLY, PRESETS, families
from jkvq.cache.specs.spec import CacheSpec, OtherLayers, SideSpec
from jkvq.support.arguments import refusal
from jkvq.support.errors import UserError, nearest


class _Field(NamedTuple):
    """A field that an override may set: how its value is read, and what is allowed, in words."""

    read: Callable[[str], Any]
    allowed: str


def _flag(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _optional(text: str) -> int | None:
    return None if text == "none" else int(text)


def _digits(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(map(int, text.split("+")))


def _layers(text: str) -> tuple[int, ...]:
    """The layers of a text like 0+3-5."""
    found: set[int] = set()
    for part in text.split("+"):
        first, _, last = part.partition("-")
        found.update(range(int(first), min(int(last or first), _MOST_LAYERS) + 1))
    if not found:
        raise ValueError("no layers")
    return tuple(sorted(found))


_NUMBER = "a whole number"
_MOST_LAYERS = 10_000  # no model has so many: one that is named is refused there
_CACHE_FIELDS = {
    "page": _Field(int, _NUMBER),
    "sink": _Field(int, _NUMBER),
    "recent": _Field(int, _NUMBER),
    "window_bits": _Field(int, "8 or 16"),
    "exact_layers": _Field(_layers, "numbers of layers, such as 0+1 or 0+4-7"),
}
_SIDE_FIELDS = {
    "bits": _Field(int, _NUMBER),
    "group": _Field(_optional, f"{_NUMBER} or none"),
    "center": _Field(_flag, "true or false"),
    "rotation": _Field(str, "a name"),
    "clip": _Field(float, "a number from 0.5 to 1"),
    "step": _Field(str, "a name"),
    "centroids": _Field(int, _NUMBER),
    "digits": _Field(_digits, "numbers with + between, such as 2+1+1+0, or none"),
}


def as_spec(cache: str | CacheSpec) -> CacheSpec:
    """The spec of a cache that is given by name or as it is."""
    if isinstance(cache, CacheSpec):
        return cache
    if not isinstance(cache, str):
        raise refusal("cache", cache, "a name such as 'jkvq-int4' or a jkvq.CacheSpec")
    return parse_spec(cache)


def parse_spec(text: str) -> CacheSpec:
    """The spec that ``text`` names, such as ``saw-int4`` or ``saw-int4,page=128``.

    A field of a side stands for keys and values alike; ``key.`` or ``value.`` before it sets that
    side alone, wherever it stands in the text.
    """
    name, *overrides = (part.strip() for part in text.split(","))
    spec, everywhere = _preset(name), [each for each in overrides if "@" not in each]
    changes = _changes(text, everywhere)
    if spec.other_layers:
        if len(changes["cache"]) < len(overrides):
            raise UserError(
                f"cache '{text}': layers of {name} have codes of their own; allowed are overrides "
                f"of {', '.join(_CACHE_FIELDS)}"
            )
        return dataclasses.replace(spec, **changes["cache"])
    spec = dataclasses.replace(spec, **_sides(spec, changes), **changes["cache"])
    return dataclasses.replace(spec, other_layers=_other_layers(text, spec, overrides))


def _sides(own: CacheSpec, changes: dict[str, dict[str, Any]]) -> dict[str, SideSpec]:
    """The sides with the values that overrides set."""
    return {
        name: dataclasses.replace(getattr(own, name), **changes["both"] | changes[name])
        for name in ("key", "value")
    }


def _other_layers(text: str, spec: CacheSpec, overrides: list[str]) -> tuple[OtherLayers, ...]:
    """The layers that overrides like ``key.bits=4@0+1`` set something for, by what they get."""
    of_layer: dict[int, list[str]] = {}
    for override in overrides:
        change, at, layers = override.partition("@")
        if not at:
            continue
        if change.partition("=")[0] in _CACHE_FIELDS:
            raise UserError(f"cache '{text}': {override}: the same in all layers; leave out @")
        try:
            named = _layers(layers)
        except ValueError:
            allowed = _CACHE_FIELDS["exact_layers"].allowed
            raise UserError(f"cache '{text}': {override}: behind @ stand {allowed}") from None
        for layer in named:
            of_layer.setdefault(layer, []).append(change)
    alike: dict[tuple[SideSpec, ...], list[int]] = {}
    for layer, changes in sorted(of_layer.items()):
        sides = _sides(spec, _changes(text, changes))
        alike.setdefault((sides["key"], sides["value"]), []).append(layer)
    alike.pop((spec.key, spec.value), None)
    return tuple(OtherLayers(tuple(layers), *sides) for sides, layers in alike.items())


def _preset(name: str) -> CacheSpec:
    if name in EVALUATED_ONLY:
        raise UserError(
            f"cache '{name}' exists in `jkvq eval ppl` and `jkvq eval fidelity` only, as a "
            "baseline: choose one that `jkvq caches` lists, such as oscar-int2"
        )
    if name not in PRESETS and (text := kept_name(name)) is not None:
        return parse_spec(text)
    if name not in PRESETS:
        known = [*PRESETS, *kept_names()]
        listed = f"there are {', '.join(families())}; `jkvq caches` lists them all."
        raise UserError(f"cache '{name}' is not known: {nearest(name, known, listed)}")
    return PRESETS[name].spec


def _changes(text: str, overrides: list[str]) -> dict[str, dict[str, Any]]:
    """The values that overrides set, by the place they belong to and the name of the field."""
    changes: dict[str, dict[str, Any]] = {"cache": {}, "both": {}, "key": {}, "value": {}}
    for override in overrides:
        match = re.fullmatch(r"(?:(key|value)\.)?(\w+)=(.+)", override)
        side, name, value = match.groups() if match else (None, "", "")
        fields = _SIDE_FIELDS if side else _CACHE_FIELDS | _SIDE_FIELDS
        if name not in fields:
            allowed = ", ".join([*_CACHE_FIELDS, *_SIDE_FIELDS])
            raise UserError(
                f"cache '{text}': '{override}' is no override; allowed are NAME=VALUE of {allowed}"
            )
        place = changes[side or ("cache" if name in _CACHE_FIELDS else "both")]
        if name in place:
            given = override.partition("=")[0]
            raise UserError(f"cache '{text}': {given} is given twice; give it once")
        try:
            place[name] = fields[name].read(value)
        except (ValueError, KeyError):
            raise UserError(
                f"cache '{text}': {override} cannot be read; allowed: {fields[name].allowed}"
            ) from None
    return changes


def spec_text(spec: CacheSpec) -> str:
    """The shortest text that `parse_spec` reads as this spec; its fields where there is none."""
    texts = (_overridden(name, preset.spec, spec) for name, preset in PRESETS.items())
    return min((text for text in texts if text is not None), key=len, default=str(spec))


def _overridden(name: str, preset: CacheSpec, wanted: CacheSpec) -> str | None:
    """The preset with the overrides that make it ``wanted``; None if there are none."""
    overrides = _differences(preset, wanted, _CACHE_FIELDS) | _side_differences(preset, wanted)
    written = [f"{field}={overrides[field]}" for field in sorted(overrides)]
    for other in wanted.other_layers:
        own, layers = _side_differences(wanted, other), _written_layers(other.layers)
        written += [f"{field}={own[field]}@{layers}" for field in sorted(own)]
    text = ",".join([name, *written])
    try:
        return text if parse_spec(text) == wanted else None
    except UserError:  # these fields do not go together
        return None


def _differences(old: Any, new: Any, fields) -> dict[str, str]:
    return {
        field: _written_layers(getattr(new, field))
        if field == "exact_layers"
        else _written(getattr(new, field))
        for field in fields
        if getattr(new, field) != getattr(old, field)
    }


def _side_differences(old: CacheSpec, new: CacheSpec | OtherLayers) -> dict[str, str]:
    key, value = (
        _differences(getattr(old, side), getattr(new, side), _SIDE_FIELDS)
        for side in ("key", "value")
    )
    found = dict(key.items() & value.items())
    for side, own in (("key", key), ("value", value)):
        found |= {f"{side}.{field}": own[field] for field in own if field not in found}
    return found


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    return str(value).lower()


def _written_layers(layers: tuple[int, ...]) -> str:
    """Numbers as ``_layers`` reads them, neighbours as one range."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and layer == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], layer]
        else:
            ranges.append([layer])
    return "+".join("-".join(map(str, ends)) for ends in ranges)


def split_names(text: str) -> list[str]:
    """The caches of a list like ``bf16,int4,page=128``: a part with ``=`` belongs to its left."""
    names: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if "=" in part and names:
            names[-1] += f",{part}"
        else:
            names.append(part)
    return list(dict.fromkeys(names))
