"""Where compiled programs are kept from one test run to the next."""

import contextlib
import platform
import re
import time
import zlib
from pathlib import Path

from platformdirs import user_cache_path

_DAYS = 7  # after which a program is compiled again: it may be nobody's any more


def _processor() -> str:
    """Unlike that of any processor with other instructions: XLA does not look at that."""
    known = Path("/proc/cpuinfo")
    flags = re.search(r"^flags.*$", known.read_text(), re.MULTILINE) if known.exists() else None
    return f"{zlib.crc32(flags[0].encode()):08x}" if flags else platform.machine()


KEPT = user_cache_path("jkvq-tests", appauthor=False) / _processor()


def tidy() -> None:
    """Removes what is old, and what a killed run left in pieces."""
    from jkvq.support.compile_cache import remove_damaged  # JAX reads its settings once

    if not KEPT.is_dir():
        return
    for path in KEPT.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another run was here
            if time.time() - path.stat().st_mtime > _DAYS * 24 * 3600:
                path.unlink()
    remove_damaged(KEPT)
