import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkvq.cache.stored import BLOCK_GROUPS
from jkvq.calibration.allocation import WIDEST, allocate, allocations, cost, greedy

SCORES = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=4)


def best_cost(score, bits: int, low: int, high: int) -> float:
    """The least cost among all widths that add up to ``bits``, by trying them."""
    tried = itertools.product(range(low, high + 1), repeat=len(score))
    return min(
        sum(s * 4.0**-b for s, b in zip(score, widths, strict=True))
        for widths in tried
        if sum(widths) == bits
    )


@given(SCORES, st.integers(0, 3), st.data())
def test_greedy_is_as_good_as_the_best(score, low, data):
    low, high = low + 1, low + 5
    bits = data.draw(st.integers(low * len(score), high * len(score)))
    widths = greedy(np.array(score), bits, low, high)
    assert widths.sum() == bits
    assert low <= widths.min() <= widths.max() <= high
    assert cost(np.array(score), widths) == pytest.approx(
        best_cost(score, bits, low, high), rel=1e-9
    )


@given(st.lists(st.floats(1e-6, 1e6), min_size=5, max_size=5), st.integers(1, WIDEST))
def test_allocate_is_the_best_of_neighbouring_widths_that_may_be_stored(score, average):
    score, bits = np.array(score), 5 * average
    widths = allocate(score, bits)
    assert widths.sum() == bits
    assert len(np.unique(widths)) <= BLOCK_GROUPS
    free = greedy(score, bits)
    if len(np.unique(free)) <= BLOCK_GROUPS:
        assert (widths == free).all()
        return
    runs = [(low, low + BLOCK_GROUPS - 1) for low in range(1, WIDEST - BLOCK_GROUPS + 2)]
    best = min(best_cost(score, bits, a, b) for a, b in runs if a * 5 <= bits <= b * 5)
    assert cost(score, widths) == pytest.approx(best, rel=1e-9)


def test_allocations_keep_every_budget():
    score = 10.0 ** np.random.default_rng(0).uniform(-4, 4, (2, 3, 16))
    widths = allocations(score)
    assert widths.shape == (8, 2, 3, 16)
    for average in range(1, 9):
        assert (widths[average - 1].sum(-1) == 16 * average).all()
    assert widths.min() == 1
    assert widths.max() == 8
