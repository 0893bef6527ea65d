"""A pool of pages with several owners."""

from collections.abc import Iterable

from jkvq.cache.sizes import PADDING_PAGE


class PagePool:
    """Hands out the pages 1 .. pages - 1; a page is free again when its last owner drops it."""

    def __init__(self, pages: int):
        self.pages = pages
        self._free = list(range(pages - 1, PADDING_PAGE, -1))
        self._owners: dict[int, int] = {}

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

    def owners(self, page: int) -> int:
        return self._owners.get(page, 0)
