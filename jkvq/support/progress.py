"""Progress on stderr: bars and spinners for people, nothing where no terminal listens."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)


def stderr() -> Console:
    """A console on what is stderr now; tests and notebooks replace it."""
    return Console(stderr=True)


def note(text: str) -> None:
    """A line for the person who waits."""
    stderr().print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


def byte_bar(label: str, total: int):
    """A bar over ``total`` bytes; advance it through the handle that the context gives."""
    return _bar(label, total, DownloadColumn())


def count_bar(label: str, total: int):
    """The same over ``total`` things."""
    return _bar(label, total, MofNCompleteColumn())


@contextmanager
def _bar(label: str, total: int, amount: ProgressColumn) -> Iterator["Bar"]:
    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        yield Bar(progress, progress.add_task(label, total=None), total)


class Bar:
    """The handle of one bar, which pulses until its first step is done."""

    def __init__(self, progress: Progress, task, total: int):
        self._progress, self._task, self._total = progress, task, total

    def advance(self, amount: int) -> None:
        """Adds to what is done."""
        self._progress.update(self._task, total=self._total, advance=amount)

    def reach(self, amount: int) -> None:
        """Sets what is done."""
        self._progress.update(self._task, total=self._total, completed=amount)


@contextmanager
def spinner(label: str) -> Iterator[None]:
    """A spinner for work of unknown length."""
    console = stderr()
    if not console.is_terminal:
        yield
        return
    with console.status(label):
        yield
