"""Figures by cache in a file, beside what they depend on: they are made again where it differs."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jkvq.support.atomic import written_whole
from jkvq.support.errors import UserError
from jkvq.support.progress import note

Parts = dict[str, str | None]  # what figures of a cache depend on, by what it is


@dataclass(frozen=True)
class _Entry:
    """What was measured of a cache, and what that depends on."""

    parts: Parts
    figures: Any


def kept_or_measured(
    place: Path,
    settings: Mapping[str, Any],
    caches: Mapping[str, Parts],
    measure: Callable[[Sequence[str]], Mapping[str, Any]],
) -> dict[str, Any]:
    """Figures by cache: from a file as far as they still hold, else measured now and kept there.

    Args:
        place: the file, named as what is measured.
        settings: what all figures in it depend on; a file with others is refused.
        caches: those that are asked for, with what the figures of each depend on besides.
        measure: makes the figures of some caches.
    """
    kept = _read(place, settings) if place.exists() else {}
    if missing := [name for name in caches if not _holds(name, kept, caches[name], place.stem)]:
        found = measure(missing)
        kept |= {name: _Entry(caches[name], found[name]) for name in missing}
        by_cache = {name: dataclasses.asdict(entry) for name, entry in kept.items()}
        with written_whole(place) as file:
            json.dump({**settings, "caches": by_cache}, file, indent=1)
    return {name: kept[name].figures for name in caches}


def _read(place: Path, settings: Mapping[str, Any]) -> dict[str, _Entry]:
    """What a file holds, by cache; refuses one with other settings."""
    try:
        kept = json.loads(place.read_text("utf-8"))
        other = next((name for name in settings if kept[name] != settings[name]), None)
        entries = {name: _Entry(**entry) for name, entry in kept["caches"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{place} is not ours, or an older version's: name another folder with --out"
        ) from None
    if other is not None:
        raise UserError(
            f"{place} was measured with {other}={kept[other]}, not {settings[other]}: give the "
            "same, or another folder with --out"
        )
    return entries


def _holds(cache: str, kept: Mapping[str, _Entry], parts: Parts, what: str) -> bool:
    """Whether figures of a cache are kept and still hold; says so where they do not."""
    if cache not in kept:
        return False
    changed = [part for part in parts if kept[cache].parts.get(part) != parts[part]]
    if changed:
        note(f"{what} of {cache} is measured again, with another {' and '.join(changed)}")
    return not changed
