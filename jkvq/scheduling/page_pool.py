"""A pool of pages with several owners."""

from collections.abc import Collection, Iterable

from jkvq.cache.sizes import PADDING_PAGE


class PagePool:
    """Hands out the pages 1 .. pages - 1; a page is free again when its last owner drops it.

    idle: pages that nobody holds but who would let go of them.
    """

    def __init__(self, pages: int):
        self.pages = pages
        self.idle = 0
        self._free = list(range(pages - 1, PADDING_PAGE, -1))
        self._owners: dict[int, int] = {}
        self._kept: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._owners)

    def take(self) -> int:
        """A page that nobody has; who asks has made sure that there is one."""
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def hold(self, pages: Iterable[int]) -> None:
        """One more owner of pages that are in use."""
        for page in pages:
            self.idle -= self._is_idle(page)
            self._owners[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One owner less."""
        for page in pages:
            self.drop_one(page)

    def drop_one(self, page: int) -> None:
        """The same for one page."""
        if self._owners[page] == 1:
            del self._owners[page]
            self._free.append(page)
        else:
            self._owners[page] -= 1
            self.idle += self._is_idle(page)

    def keep(self, pages: Collection[int]) -> None:
        """One more owner, who lets go of the pages if others need them; a page has one of these."""
        self.hold(pages)
        self._kept.update(pages)

    def let_go(self, pages: Collection[int]) -> None:
        """That owner no longer."""
        self.idle -= sum(map(self._is_idle, pages))
        self._kept.difference_update(pages)
        self.drop(pages)

    def owners(self, page: int) -> int:
        return self._owners.get(page, 0)

    def _is_idle(self, page: int) -> bool:
        return self._owners[page] == 1 and page in self._kept
