"""Runs a command on a terminal of its own, and says how long its screen stood still.

python -m scripts.record_screen jkvq generate "Why is the sky blue?" -n 64
"""

import os
import pty
import select
import sys
import time

_GAP = 1.0  # seconds that are worth a line


def main() -> None:
    """Prints every gap, the longest one, and how the command ended."""
    start, gaps, before = time.monotonic(), [], b""
    child, screen = pty.fork()
    if not child:
        os.execvp(sys.argv[1], sys.argv[1:])
    last = start
    while data := _changes(screen):
        now = time.monotonic()
        gaps.append(now - last)
        if gaps[-1] > _GAP:
            print(f"{last - start:6.1f} s: nothing for {gaps[-1]:.1f} s after {before[-40:]!r}")
        last, before = now, data
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"{last - start:.1f} s, longest gap {max(gaps):.1f} s, {len(gaps)} changes, exit {code}")


def _changes(screen: int) -> bytes:
    """What is written next; nothing at the end."""
    select.select([screen], [], [])
    try:
        return os.read(screen, 1 << 16)
    except OSError:  # how a terminal says that its last writer has gone
        return b""


if __name__ == "__main__":
    main()
