"""Caches that the user gave a name: texts in a folder of the user's cache."""

import re
from pathlib import Path

from jkvq.support.atomic import written_whole
from jkvq.support.errors import UserError
from jkvq.support.user_cache import cache_folder


def require_free_name(name: str, taken) -> None:
    """Refuses what is no name, or one of those that are taken."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9._-]{0,63}", name):
        raise UserError(f"name={name}: small letters, digits, dots and dashes, a letter first")
    if name in taken:
        raise UserError(f"name={name}: a cache has that name already; give another")


def keep_name(name: str, text: str) -> Path:
    """Gives a cache a name, which it keeps until another gets it."""
    with written_whole(_file(name)) as file:
        file.write(f"{text}\n")
    return _file(name)


def kept_name(name: str) -> str | None:
    """The text of the cache with a name; None if none has it."""
    if "/" in name or name.startswith("."):
        return None
    try:
        return _file(name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def kept_names() -> dict[str, str]:
    """All names that the user gave, with the caches' texts."""
    found = {path.stem: kept_name(path.stem) for path in sorted(_file("").parent.glob("*.txt"))}
    return {name: text for name, text in found.items() if text is not None}


def _file(name: str) -> Path:
    return cache_folder() / "caches" / f"{name}.txt"
