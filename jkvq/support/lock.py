"""Locks between processes that write the same file or folder."""

from pathlib import Path

from filelock import FileLock


def lock_beside(path: Path) -> FileLock:
    """The lock of whoever writes ``path``: a hidden file beside it, which stays there."""
    return FileLock(path.with_name(f".{path.name}.lock"))
