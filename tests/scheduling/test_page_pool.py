import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkvq.cache.sizes import PADDING_PAGE
from jkvq.scheduling.page_pool import PagePool


@given(st.integers(1, 40), st.lists(st.tuples(st.sampled_from("thdkl"), st.integers(0, 8))))
def test_pages_are_free_when_their_last_owner_drops_them(size, requests):
    pool, holdings, kept = PagePool(size), [], set()
    for kind, number in requests:
        if kind == "t":
            holdings.append([pool.take() for _ in range(min(number, pool.free))])
        elif holdings and kind == "h":
            pool.hold(holdings[number % len(holdings)])
            holdings.append(holdings[number % len(holdings)])
        elif holdings and kind == "k":
            new = [page for page in holdings[number % len(holdings)] if page not in kept]
            pool.keep(new)
            kept.update(new)
        elif kind == "l":
            gone = sorted(kept)[:number]
            pool.let_go(gone)
            kept.difference_update(gone)
        elif holdings:
            pool.drop(holdings.pop(number % len(holdings)))
        held = [*kept, *(page for pages in holdings for page in pages)]
        assert pool.idle == sum(held.count(page) == 1 for page in kept)
        assert all(PADDING_PAGE < page < size for page in held)
        assert all(pool.owners(page) == held.count(page) for page in range(size))
        assert pool.free == size - 1 - len(set(held)) == size - 1 - pool.used


def test_a_page_that_nobody_has_cannot_be_dropped():
    pool = PagePool(4)
    pages = [pool.take(), pool.take()]
    pool.drop(pages)
    with pytest.raises(KeyError):
        pool.drop(pages)


def test_no_page_is_taken_that_is_not_there():
    pool = PagePool(2)
    assert pool.take() == 1
    with pytest.raises(IndexError):
        pool.take()
