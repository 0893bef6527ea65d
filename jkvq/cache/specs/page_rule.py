"""Which tokens of a sequence are packed, and in which pages.

The first ``sink`` tokens stay in 16 bits, and at least the ``recent`` latest ones. The tokens
between are packed a page at a time, when a whole page of them has left the recent window.
"""

from dataclasses import dataclass


class PageRule:
    """The arithmetic of sinks, recent windows and pages: positions are numbers or arrays."""

    sink: int
    recent: int
    page: int

    @property
    def windowed(self) -> bool:
        """Whether some tokens stay in 16 bits."""
        return self.recent > 0

    def packed(self, length):
        """How many of ``length`` tokens are packed."""
        if not self.windowed:
            return length
        over = length - self.sink - self.recent
        return (over + abs(over)) >> 1 & -self.page  # whole pages, and at least 0

    def reads_packed(self, position, token):
        """Whether a query at ``position`` reads ``token``, one up to its own, packed."""
        behind = token - self.sink
        return (behind >= 0) & (behind < self.packed(position + 1))

    def page_number(self, position):
        """Of tokens: packed ones' pages from 0 on, the sink's below."""
        return (position - self.sink) // self.page

    def page_middle(self, number):
        """The position of the middle of pages."""
        return self.sink + number * self.page + self.page // 2

    def middle(self, position):
        """The middle of the pages of tokens."""
        return self.page_middle(self.page_number(position))


@dataclass(frozen=True)
class Windows(PageRule):
    """The 16-bit windows of a cache, and the pages that tokens are packed in when they leave."""

    sink: int
    recent: int
    page: int
