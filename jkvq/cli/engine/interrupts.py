"""What Ctrl-C does while a command is at work: it ends the program, unless the command says else.

`jkvq.cli.main.main` listens in a thread of its own and asks `heeded`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_next: list[Callable[[], bool]] = []


@contextmanager
def on_ctrl_c(heed: Callable[[], bool]) -> Iterator[None]:
    """What the next Ctrl-C does meanwhile; it returns whether the program goes on.

    It is called once, in the thread that listens: the Ctrl-C after it ends the program.
    """
    _next.append(heed)
    try:
        yield
    finally:
        if heed in _next:  # unless it was called
            _next.remove(heed)


def heeded() -> bool:
    """Does what a command has said for Ctrl-C; returns whether the program goes on."""
    return bool(_next) and _next.pop()()
