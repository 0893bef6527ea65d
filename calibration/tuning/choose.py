"""The cache that serves a target best, by what its layers' codes cost."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jkvq.cache.specs.spec import CacheSpec
from jkvq.calibration.tuning.widths import Window, cache_of, choices

_TRIES = 6  # at a KL that is kept as measured
_SLACK = 0.97  # of the KL that may be used up: other windows measure a little more


class Candidate(NamedTuple):
    """A cache, and the KL that its layers' losses add up to."""

    spec: CacheSpec
    loss: float


def candidates(losses: Mapping[Window, Float[np.ndarray, "n L"]], head_dim: int) -> list[Candidate]:
    """All caches that are worth a look, by falling loss; ``losses`` by windows."""
    found = [
        Candidate(cache_of(pairs, window), choice.loss)
        for window, of_layers in losses.items()
        for choice, pairs in choices(of_layers, head_dim)
    ]
    return sorted(found, key=lambda each: each.loss)


def least_loss(every: list[Candidate], fits: Callable[[CacheSpec], bool]) -> Candidate | None:
    """The cache with the least loss among those that fit; None if none does."""
    return next((each for each in every if fits(each.spec)), None)


def fewest_bits(
    every: list[Candidate],
    most: float,
    bits: Callable[[CacheSpec], float],
    measure: Callable[[CacheSpec], float],
) -> Candidate | None:
    """The cache with the fewest bits whose KL is at most ``most`` as measured; None if none has it.

    Losses add up to about the KL: how much it is of them is measured, and taken for the next try.
    """
    ratio, best = 1.0, None
    tried: set[CacheSpec] = set()
    for _ in range(_TRIES):
        allowed = [each for each in every if each.loss * ratio <= _SLACK * most]
        if not allowed:
            break
        chosen = min(allowed, key=lambda each: (bits(each.spec), each.loss))
        if chosen.spec in tried:
            break
        tried.add(chosen.spec)
        kl = measure(chosen.spec)
        if kl <= most and (best is None or bits(chosen.spec) < bits(best.spec)):
            best = chosen
        ratio = kl / chosen.loss if chosen.loss > 0 else ratio * 2
    return best
