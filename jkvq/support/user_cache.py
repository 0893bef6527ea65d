"""The folder in which jkvq keeps what it can make or fetch again."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from platformdirs import user_cache_path

_STALE = 24 * 3600  # seconds: who writes a draft has written to it since, or is gone
_NO_DRAFTS = (".lock", ".learning")  # are hidden too: locks, and how far `--learn` is


def cache_folder() -> Path:
    """Where models, calibrations and compiled programs are kept.

    $JKVQ_CACHE if it is set; else the platform's place for caches, which is ~/.cache/jkvq on Linux
    unless $XDG_CACHE_HOME names another.
    """
    chosen = os.environ.get("JKVQ_CACHE")
    return Path(chosen).expanduser() if chosen else user_cache_path("jkvq", appauthor=False)


def stale_drafts() -> Iterator[Path]:
    """What processes that were killed left half written in the user's cache.

    Drafts are hidden and lie where the whole will: a model being fetched, a calibration, a check.
    One is stale when nothing in it has changed for a day.
    """
    for pattern in ("models/.*", "calibrations/*/.*", "checks/.*"):
        for path in cache_folder().glob(pattern):
            age = time.time() - last_change(path)
            if path.suffix not in _NO_DRAFTS and age > _STALE and is_inside(path):
                yield path


def sweep_drafts() -> None:
    """Removes stale drafts, as far as it may."""
    for path in stale_drafts():
        remove(path)


def is_inside(path: Path) -> bool:
    """Whether a path of the user's cache lies there, and in no folder that a link leads to."""
    return path.parent.resolve().is_relative_to(cache_folder().resolve())


def remove(path: Path) -> bool:
    """Removes a file, a folder or a link, but not what it names; whether that could be done."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return not os.path.lexists(path)


def last_change(path: Path) -> float:
    """When a file, or anything in a folder, was changed; now if somebody is at it."""
    try:
        return max(each.lstat().st_mtime for each in (path, *path.rglob("*")))
    except OSError:  # gone since it was listed
        return time.time()
