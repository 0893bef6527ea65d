"""Progress on stderr: bars and spinners on a terminal, a line now and then elsewhere."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

_FIRST_LINE, _NEXT_LINES = 1.0, 10.0  # seconds


def stderr() -> Console:
    """A console on what is stderr now; tests and notebooks replace it."""
    return Console(stderr=True)


class Display(Protocol):
    """What is on the screen while something is done; it may be taken off and put on again."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


_on_screen: list[Display] = []  # only the last one is shown


@contextmanager
def _shown(display: Display) -> Iterator[None]:
    if _on_screen:
        _on_screen[-1].stop()
    _on_screen.append(display)
    display.start()
    try:
        yield
    finally:
        display.stop()
        if display in _on_screen:  # unless all were cleared
            _on_screen.remove(display)
        if _on_screen:
            _on_screen[-1].start()


def _print(text: str, style: str) -> None:
    stderr().print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def say(text: str, style: str) -> None:
    """A line for the person who waits, above what is shown."""
    if _on_screen:
        _on_screen[-1].stop()
    _print(text, style)
    if _on_screen:
        _on_screen[-1].start()


def note(text: str) -> None:
    """A line of lesser weight."""
    say(text, "dim")


def clear() -> None:
    """Takes everything off the screen for good, and leaves the cursor to be seen."""
    while _on_screen:
        _on_screen.pop().stop()


class _Lines:
    """Lines where no terminal listens: after a second, then every ten."""

    def __init__(self, say: Callable[[], str]):
        self._say, self._ended = say, threading.Event()

    def start(self) -> None:
        self._ended = threading.Event()
        threading.Thread(target=self._go_on, args=(self._ended,), daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def _go_on(self, ended: threading.Event) -> None:
        pause = _FIRST_LINE
        while not ended.wait(pause):
            _print(self._say(), "dim")
            pause = _NEXT_LINES


class Bar:
    """The handle of one bar."""

    def __init__(self, label: str, total: int):
        self._label, self._total, self.done = label, total, 0.0
        self._shown: tuple[Progress, TaskID] | None = None
        self._first: tuple[float, float] | None = None  # when how much had been done

    def show(self, progress: Progress) -> None:
        """Puts it on a display, where it pulses until its first step is done."""
        self._shown = progress, progress.add_task(self._label, total=None)

    def advance(self, amount: float) -> None:
        """Adds to what is done."""
        self.reach(self.done + amount)

    def reach(self, amount: float) -> None:
        """Sets what is done."""
        self.done = amount
        self._first = self._first or (time.monotonic(), amount)
        if self._shown is not None:
            progress, task = self._shown
            progress.update(task, total=self._total, completed=amount)

    def rename(self, label: str) -> None:
        """Says something else beside it."""
        self._label = label
        if self._shown is not None:
            progress, task = self._shown
            progress.update(task, description=label)

    def line(self) -> str:
        """How far it is, in a line."""
        if not self.done:
            return f"{self._label} ..."
        left = self._left()
        return f"{self._label}: {min(self.done / self._total, 1):.0%}{left} ..."

    def _left(self) -> str:
        """How long the rest takes, if it goes on as it did since the first step."""
        start, before = self._first or (0.0, 0.0)
        if not before < self.done < self._total:
            return ""
        seconds = (time.monotonic() - start) * (self._total - self.done) / (self.done - before)
        return f", {timedelta(seconds=round(seconds))} left"


def byte_bar(label: str, total: int):
    """A bar over ``total`` bytes; advance it through the handle that the context gives."""
    return _bar(label, total, DownloadColumn())


def count_bar(label: str, total: int):
    """The same over ``total`` things."""
    return _bar(label, total, MofNCompleteColumn())


@contextmanager
def _bar(label: str, total: int, amount: ProgressColumn) -> Iterator[Bar]:
    console, bar = stderr(), Bar(label, total)
    if not console.is_terminal:
        with _shown(_Lines(bar.line)):
            yield bar
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), amount
    progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    bar.show(progress)
    with _shown(progress):
        yield bar


@contextmanager
def spinner(label: str) -> Iterator[None]:
    """For work of unknown length; what is inside may have displays of its own."""
    console = stderr()
    with _shown(console.status(label) if console.is_terminal else _Lines(lambda: f"{label} ...")):
        yield
