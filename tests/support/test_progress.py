import io
import re
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from jkvq.support import progress


@pytest.fixture
def screen(monkeypatch):
    """What is written to a terminal, or to a file."""

    def opened(*, terminal: bool) -> io.StringIO:
        out = io.StringIO()
        monkeypatch.setattr(
            progress, "stderr", lambda: Console(file=out, force_terminal=terminal, width=80)
        )
        return out

    return opened


def comes(condition: Callable[[], bool]) -> bool:
    """Whether a condition holds within a minute, which is far more than any machine needs."""
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def wait_for(out: io.StringIO, text: str) -> None:
    assert comes(lambda: text in out.getvalue()), out.getvalue()


def test_without_a_terminal_lines_say_what_is_done_and_how_far_it_is(screen, monkeypatch):
    monkeypatch.setattr(progress, "_FIRST_LINE", 0.01)
    monkeypatch.setattr(progress, "_NEXT_LINES", 0.01)
    out = screen(terminal=False)
    with progress.spinner("Waiting"):
        wait_for(out, "Waiting ...\n")
    with progress.count_bar("Counting", 8) as bar:
        wait_for(out, "Counting ...\n")
        bar.advance(2)
        wait_for(out, "Counting: 25% ...\n")
        bar.reach(8)
        wait_for(out, "Counting: 100% ...\n")
    time.sleep(0.05)
    written = out.getvalue()
    time.sleep(0.05)
    assert out.getvalue() == written  # nothing more is said


def test_what_is_quickly_done_is_not_mentioned_without_a_terminal(screen):
    out = screen(terminal=False)
    with progress.byte_bar("Fetching", 8) as bar:
        bar.advance(8)
    assert out.getvalue() == ""


def test_on_a_terminal_something_always_moves(screen):
    out = screen(terminal=True)
    with progress.count_bar("Counting", 8) as bar:
        bar.advance(2)
        wait_for(out, "2/8")
        written = len(out.getvalue())
        assert comes(lambda: len(out.getvalue()) > written)  # it turns though nothing advances


def test_what_is_inside_takes_the_place_of_what_is_around_it(screen):
    out = screen(terminal=True)
    with progress.spinner("Outer"):
        wait_for(out, "Outer")
        with progress.count_bar("Inner", 8):
            wait_for(out, "Inner")
            time.sleep(0.2)
            inside = out.getvalue().rpartition("Inner")[0].rpartition("Outer")[2]
            assert len(re.findall("Inner", inside)) >= 1
        before = out.getvalue().count("Outer")
        assert comes(lambda: out.getvalue().count("Outer") > before)  # it is back
    assert progress._on_screen == []


def test_what_is_cleared_does_not_come_back_and_the_cursor_does(screen):
    out = screen(terminal=True)
    with progress.spinner("Waiting"):
        wait_for(out, "Waiting")
        progress.clear()
        progress.say("interrupted", "red")
        after = out.getvalue().rpartition("interrupted")[2]
        assert "Waiting" not in after
        assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l")
