"""The host-side page allocator."""

from jkvq.support.errors import UserError

PADDING_PAGE = 0  # takes the writes of padding; never handed out


def power_of_two(count: int, least: int = 1) -> int:
    """``count`` rounded up to a power of two, ``least`` at least."""
    return max(least, 1 << (count - 1).bit_length())


# Programs are compiled for sizes of pools and tables: those of shorter texts share one.
_LEAST_TOKENS = 4096


def roomy_pool(pages: int, page: int) -> int:
    """So many pages of ``page`` tokens rounded up to 2^k or 3 * 2^k: little memory is unused."""
    least = max(1, _LEAST_TOKENS // page)
    power = power_of_two(max(pages, 1), least)
    return power * 3 // 4 if least < pages <= power * 3 // 4 else power


def roomy_table(pages: int, page: int) -> int:
    """Columns for so many pages, rounded up to 2^k: attention reads what is in use only."""
    return power_of_two(max(pages, 1), max(1, _LEAST_TOKENS // page))


class PageAllocator:
    """Hands out the pages 1 .. pages - 1 of a pool, each to one owner at a time."""

    def __init__(self, pages: int):
        self._free = list(range(pages - 1, PADDING_PAGE, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        if count > self.free:
            raise UserError(f"{count} pages were asked for and {self.free} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._taken.update(pages)
        return pages

    def release(self, pages: list[int]) -> None:
        if not self._taken.issuperset(pages) or len(set(pages)) != len(pages):
            raise ValueError(f"pages {pages} are not all taken")
        self._taken.difference_update(pages)
        self._free.extend(pages)
