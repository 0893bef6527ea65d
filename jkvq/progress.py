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
    """A console on today's stderr."""
    return Console(stderr=True)


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
        yield Bar(progress, progress.add_task(label, total=total))


class Bar:
    """The handle of one bar."""

    def __init__(self, progress: Progress, task):
        self._progress, self._task = progress, task

    def advance(self, amount: int) -> None:
        self._progress.advance(self._task, amount)

    def reach(self, amount: int) -> None:
        self._progress.update(self._task, completed=amount)


@contextmanager
def spinner(label: str) -> Iterator[None]:
    """A spinner for work of unknown length."""
    console = stderr()
    if not console.is_terminal:
        yield
        return
    with console.status(label):
        yield
