import pytest
from hypothesis import given
from hypothesis import strategies as st

import jkvq
from jkvq.cache.page_pool import PADDING_PAGE, PageAllocator


@given(st.integers(1, 40), st.lists(st.integers(-8, 8), max_size=30))
def test_pages_have_one_owner_at_a_time(pool, requests):
    allocator, held = PageAllocator(pool), []
    for request in requests:  # positive: take so many; negative: give one holding back
        if request < 0 and held:
            allocator.release(held.pop(request % len(held)))
        elif request >= 0:
            free = allocator.free
            if request > free:
                with pytest.raises(jkvq.UserError, match=f"{request} pages .* {free} are free"):
                    allocator.allocate(request)
            else:
                held.append(allocator.allocate(request))
        taken = [page for pages in held for page in pages]
        assert len(set(taken)) == len(taken)
        assert PADDING_PAGE not in taken
        assert all(0 < page < pool for page in taken)
        assert allocator.free == pool - 1 - len(taken)


def test_pages_released_twice_are_refused():
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.release(pages)
    with pytest.raises(ValueError, match="not all taken"):
        allocator.release(pages)
