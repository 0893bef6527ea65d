"""Compiled programs, kept in the user's cache for the next process.

JAX keeps them if it is told where. Programs are named by what they compute and by the versions and
devices they are for, so that the folder may be moved and copied.
"""

import contextlib
import importlib
import zlib
from pathlib import Path
from typing import Any

import jax

from jkvq.support.user_cache import cache_folder

_DEFAULT_LEAST_SECONDS = 1.0  # JAX keeps only what took longer to compile
_CHECKED = ".checked"  # written when all older entries were whole
_ZSTD = b"\x28\xb5\x2f\xfd"


def keep_compiled_programs() -> None:
    """Lets JAX keep what it compiles in the user's cache, unless the user has chosen a place."""
    config: Any = jax.config  # its fields are not typed
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    folder = cache_folder() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_damaged(folder)
    except OSError:  # no place to keep anything: programs serve this process
        return
    config.update("jax_compilation_cache_dir", str(folder))
    # XLA's own caches would put their folder's path into the names of programs.
    config.update("jax_persistent_cache_enable_xla_caches", "none")
    if config.jax_persistent_cache_min_compile_time_secs == _DEFAULT_LEAST_SECONDS:
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def remove_damaged(folder: Path) -> None:
    """Removes entries that a killed process or a full disk left in pieces.

    JAX would find them at every start, warn, compile, and leave them as they are. Only those are
    read that have changed since the last look.
    """
    stamp = folder / _CHECKED
    try:
        since = stamp.stat().st_mtime_ns
    except FileNotFoundError:
        since = 0
    stamp.touch()
    for entry in folder.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another process was here
            if entry.stat().st_mtime_ns >= since and not _is_whole(entry.read_bytes()):
                entry.unlink()


def _is_whole(entry: bytes) -> bool:
    """Whether an entry is a whole compressed stream, as JAX writes it."""
    try:
        if entry.startswith(_ZSTD):
            importlib.import_module("zstandard").ZstdDecompressor().decompress(entry)
        else:
            zlib.decompress(entry)
    except Exception:  # whatever either library makes of it, JAX could not read it
        return False
    return True
