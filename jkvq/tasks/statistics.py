"""How sure a mean of scores is, and a difference of two means over the same problems."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

_RESAMPLES = 10_000
_Z = 1.959964  # of a two-sided interval of 95%


class Interval(NamedTuple):
    """A figure, and where it lies with 95% confidence."""

    value: float
    low: float
    high: float


def mean_score(scores: Float[np.ndarray, " n"]) -> Interval:
    """The mean of scores from 0 to 1, with Wilson's interval.

    Scores between 0 and 1 vary less than those that are either; for them it is somewhat wide.
    Without scores all of it is NaN.
    """
    if not len(scores):
        return Interval(math.nan, math.nan, math.nan)
    n, mean = len(scores), float(np.mean(scores))
    centre = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2))
    return Interval(mean, max(0.0, centre - half), min(1.0, centre + half))


def paired_difference(
    scores: Float[np.ndarray, " n"], base: Float[np.ndarray, " n"], seed: int = 0
) -> Interval:
    """The mean difference over the same problems, with a bootstrap over problems."""
    differences = np.asarray(scores) - np.asarray(base)
    rng = np.random.default_rng(seed)
    # Resampling n problems is a multinomial draw over the differences that there are.
    values, counts = np.unique(differences, return_counts=True)
    draws = rng.multinomial(len(differences), counts / counts.sum(), _RESAMPLES)
    low, high = np.quantile(draws @ values / len(differences), (0.025, 0.975))
    return Interval(float(differences.mean()), float(low), float(high))


def area_over_lengths(means: dict[int, float]) -> float:
    """The area under the means over the logarithm of lengths, from 0 to 1."""
    lengths = sorted(means)
    if len(lengths) == 1:
        return means[lengths[0]]
    at, heights = np.log2(lengths), [means[length] for length in lengths]
    return float(np.trapezoid(heights, at) / (at[-1] - at[0]))
