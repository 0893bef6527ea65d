"""Sizes of pools and block tables."""

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
