"""The folder in which jkvq keeps what it can make or fetch again."""

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_folder() -> Path:
    """Where models, calibrations and compiled programs are kept.

    $JKVQ_CACHE if it is set; else the platform's place for caches, which is ~/.cache/jkvq on Linux
    unless $XDG_CACHE_HOME names another.
    """
    chosen = os.environ.get("JKVQ_CACHE")
    return Path(chosen).expanduser() if chosen else user_cache_path("jkvq", appauthor=False)
