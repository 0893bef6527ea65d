"""The cache spec: every way of storing keys and values is a value of one frozen dataclass.

A user writes a spec as text, a preset's name with optional overrides: ``bf16`` or
``bf16,page=128``.
"""

import dataclasses
from dataclasses import dataclass

from jkvq.errors import UserError, nearest


@dataclass(frozen=True)
class SideSpec:
    """How one side of the cache, keys or values, is stored.

    bits: per element; 16 is bfloat16, 32 is float32.
    """

    bits: int

    @property
    def bits_per_element(self) -> float:
        return float(self.bits)


@dataclass(frozen=True)
class CacheSpec:
    """How a KV cache is stored.

    page: tokens per page, a power of two. Pages are the unit in which memory is handed out.
    """

    key: SideSpec
    value: SideSpec
    page: int = 64

    def __post_init__(self):
        for name, side in (("key", self.key), ("value", self.value)):
            if side.bits not in (16, 32):
                raise UserError(f"{name} bits={side.bits}: a cache is stored in 16 or 32 bits")
        if not (8 <= self.page <= 1024 and self.page.bit_count() == 1):
            raise UserError(
                f"page={self.page}: tokens per page, a power of two from 8 to 1024; 64 is usual"
            )

    @property
    def bits_per_element(self) -> float:
        return (self.key.bits_per_element + self.value.bits_per_element) / 2


@dataclass(frozen=True)
class Preset:
    """A spec under a name, with one line about it."""

    spec: CacheSpec
    about: str


PRESETS = {
    "bf16": Preset(
        CacheSpec(key=SideSpec(bits=16), value=SideSpec(bits=16)),
        "bfloat16 keys and values: the 16-bit baseline",
    ),
    "f32": Preset(
        CacheSpec(key=SideSpec(bits=32), value=SideSpec(bits=32)),
        "float32 keys and values: nothing rounded, for comparisons",
    ),
}

# The fields that a string may override.
_OVERRIDES = {"page": int}


def parse_spec(text: str) -> CacheSpec:
    """The spec that ``text`` names, such as ``bf16`` or ``bf16,page=128``."""
    name, *overrides = (part.strip() for part in text.split(","))
    if name not in PRESETS:
        raise UserError(f"cache '{name}' is not known: {nearest(name, PRESETS)}")
    changes = {}
    for override in overrides:
        field, equals, value = override.partition("=")
        if field not in _OVERRIDES or not equals:
            allowed = ", ".join(f"{key}=..." for key in _OVERRIDES)
            raise UserError(f"cache '{text}': '{override}' is no override; allowed: {allowed}")
        try:
            changes[field] = _OVERRIDES[field](value)
        except ValueError:
            raise UserError(f"cache '{text}': {field}={value} is not a number") from None
    return dataclasses.replace(PRESETS[name].spec, **changes)


def split_specs(text: str) -> dict[str, CacheSpec]:
    """The specs of a list such as ``bf16,f32,page=128``: a part with ``=`` belongs to its left."""
    names: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if "=" in part and names:
            names[-1] += f",{part}"
        else:
            names.append(part)
    return {name: parse_spec(name) for name in names}
