"""Locks between processes that write the same file or folder."""

import os
from pathlib import Path

from filelock import FileLock


def lock_beside(path: Path) -> FileLock:
    """The lock of whoever writes ``path``: a hidden file beside it, which stays there."""
    return FileLock(hidden_beside(path, "lock"))


def hidden_beside(path: Path, kind: str) -> Path:
    """The hidden file of a kind beside ``path``, which may be ``.`` too."""
    place = Path(os.path.abspath(path))
    return place.parent / f".{place.name}.{kind}"
