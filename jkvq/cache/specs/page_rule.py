"""Which tokens of a sequence are packed, and in which pages.

Page j of a sequence is its tokens j p to (j + 1) p - 1. The pages of the first ``sink`` tokens stay
in windows, and at least the ``recent`` latest tokens do. The pages between are packed, each when
the last of its tokens has left the recent window.
"""

from dataclasses import dataclass


def in_whole_pages(tokens: int, page: int) -> int:
    """So many tokens, rounded up to whole pages."""
    return -(-tokens // page) * page


class PageRule:
    """The arithmetic of sinks, recent windows and pages: positions are numbers or arrays.

    ``sink`` and ``recent`` are whole pages.
    """

    sink: int
    recent: int
    page: int

    @property
    def windowed(self) -> bool:
        """Whether some tokens stay in windows."""
        return self.recent > 0

    @property
    def sink_pages(self) -> int:
        return self.sink // self.page

    @property
    def exact_pages(self) -> int:
        """Pages of windows that a query reads: of the sink, recent, and the one that fills."""
        return self.sink_pages + self.recent // self.page + 1 if self.windowed else 0

    def packed(self, length):
        """How many of ``length`` tokens are packed: those from the sink's end on."""
        if not self.windowed:
            return length
        over = length - self.sink - self.recent
        return (over + abs(over)) >> 1 & -self.page  # whole pages, and at least 0

    def reads_packed(self, position, token):
        """Whether a query at ``position`` reads ``token``, one up to its own, packed."""
        behind = token - self.sink
        return (behind >= 0) & (behind < self.packed(position + 1))

    def page_number(self, position):
        """The pages of tokens."""
        return position // self.page

    def page_middle(self, number):
        """The position of the middle of pages."""
        return number * self.page + self.page // 2

    def middle(self, position):
        """The middle of the pages of tokens."""
        return self.page_middle(self.page_number(position))


@dataclass(frozen=True)
class Windows(PageRule):
    """The windows of a cache, and the pages that tokens are packed in when they leave."""

    sink: int
    recent: int
    page: int

    def __post_init__(self):
        for name in ("sink", "recent"):
            whole = in_whole_pages(getattr(self, name), self.page)
            object.__setattr__(self, name, whole)
