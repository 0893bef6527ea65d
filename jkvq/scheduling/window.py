"""Pages that a sequence has for a while: those of its latest tokens, and maybe of its first ones.

Two pools are of that kind: of pages of windows, and of pages of local layers, which see the latest
tokens only. A page goes back to its pool once no query to come reads it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from jkvq.cache.sizes import PADDING_PAGE
from jkvq.scheduling.page_pool import PagePool


@dataclass
class Held:
    """What a sequence has of such a pool.

    pages: by their numbers in the sequence.
    end: the number behind the last of them.
    drops_at: tokens stored when a page is next let go of.
    """

    pages: dict[int, int] = field(default_factory=dict)
    end: int = 0
    drops_at: int = 0


@dataclass(frozen=True)
class Window:
    """A pool, and which of a sequence's pages it holds.

    table: the pages of each slot's sequence, by their numbers in it.
    page: tokens of a page.
    lag: the page of token t - lag is the first that is read with t tokens stored,
    least: but for those below this one.
    sinks: so many of the first pages are read for ever.
    last: the number behind the last page that there is with so many tokens.
    """

    pool: PagePool
    table: Int[np.ndarray, "slots columns"]
    page: int
    lag: int
    least: int
    sinks: int
    last: Callable[[int], int]

    def first(self, tokens: int) -> int:
        """The first page behind the sinks that is read with so many tokens stored."""
        return max(self.least, (tokens - self.lag) // self.page)

    def numbers(self, stored: int, end: int) -> list[int]:
        """Pages of a sequence that it must have while it grows."""
        last = self.last(end)
        return [*range(min(self.sinks, last)), *range(self.first(stored), last)]

    def take(self, held: Held, slot: int, numbers: Iterable[int], make_room) -> None:
        """Pages for these of a sequence, where it has none; ``make_room`` frees one if need be."""
        for number in numbers:
            if number not in held.pages:
                if not self.pool.free:
                    make_room(self.pool)  # there is a window for every slot
                self.table[slot, number] = held.pages[number] = self.pool.take()
            held.end = number + 1

    def drop(self, held: Held, slot: int, numbers: Iterable[int]) -> None:
        """Lets go of pages."""
        for number in numbers:
            self.pool.drop_one(held.pages.pop(number))
            self.table[slot, number] = PADDING_PAGE

    def advance(self, held: Held, slot: int, stored: int) -> int:
        """Lets go of what nobody reads with so many tokens stored; when that is to be done next."""
        if stored >= held.drops_at:
            first = self.first(stored)
            self.drop(held, slot, [n for n in held.pages if self.sinks <= n < first])
            held.drops_at = (first + 1) * self.page + self.lag
        return held.drops_at
