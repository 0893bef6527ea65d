"""What Ctrl-C does while a command is at work: it ends the program, unless the command says else.

`jkvq.cli.main.main` listens in a thread of its own and asks `heeded`. SIGTERM, by which machines
end programs, is obeyed at once, unless the command says what to do first.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_next: list[Callable[[], bool]] = []
_last: list[Callable[[], bool]] = []


@contextmanager
def on_ctrl_c(heed: Callable[[], bool]) -> Iterator[None]:
    """What the next Ctrl-C does meanwhile; it returns whether the program goes on.

    It is called once, in the thread that listens: the Ctrl-C after it ends the program.
    """
    with _meanwhile(_next, heed):
        yield


@contextmanager
def on_end(heed: Callable[[], bool]) -> Iterator[None]:
    """The same for Ctrl-C and SIGTERM."""
    with _meanwhile(_next, heed), _meanwhile(_last, heed):
        yield


@contextmanager
def _meanwhile(called: list[Callable[[], bool]], heed: Callable[[], bool]) -> Iterator[None]:
    called.append(heed)
    try:
        yield
    finally:
        if heed in called:  # unless it was called
            called.remove(heed)


def heeded() -> bool:
    """Does what a command has said for Ctrl-C; returns whether the program goes on."""
    return bool(_next) and _next.pop()()


def terminated(number: int, frame: object) -> None:
    """Handles SIGTERM: does what a command has said for it, or ends as the system would."""
    if not (_last and _last.pop()()):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
