import itertools

import numpy as np
import pytest

from jkvq.tasks.statistics import area_over_lengths, mean_score, paired_difference


@pytest.mark.parametrize(("right", "of"), [(0, 4), (4, 4), (7, 10), (900, 1319)])
def test_the_interval_of_an_accuracy_is_wilsons(right, of):
    from scipy import stats  # takes a second

    found = mean_score(np.array([1.0] * right + [0.0] * (of - right)))
    expected = stats.binomtest(right, of).proportion_ci(0.95, "wilson")
    assert found == pytest.approx((right / of, expected.low, expected.high), abs=1e-6)


def test_the_interval_of_a_difference_is_that_of_all_resamples():
    scores, base = np.array([1.0, 0.0, 1.0, 1.0, 0.5]), np.array([0.0, 0.0, 1.0, 0.0, 1.0])
    found = paired_difference(scores, base)
    assert found.value == pytest.approx(0.3)
    means = [np.mean(draw) for draw in itertools.product(scores - base, repeat=5)]  # all 5 ** 5
    low, high = np.quantile(means, (0.025, 0.975))
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.1)  # a step of the means
    assert found == paired_difference(scores, base)


def test_equal_scores_differ_by_nothing():
    scores = np.array([1.0, 0.0, 0.25])
    assert paired_difference(scores, scores) == (0, 0, 0)


def test_the_area_is_under_straight_lines_over_the_logarithm():
    assert area_over_lengths({4096: 0.7}) == 0.7
    assert area_over_lengths({4096: 1.0, 8192: 0.5, 32768: 0.1}) == pytest.approx(
        (0.75 * 1 + 0.3 * 2) / 3
    )
