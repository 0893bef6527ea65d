"""One option for every layer: the least loss at every cost."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Choice(NamedTuple):
    """An option for every layer, and what they add up to."""

    cost: int
    loss: float
    options: tuple[int, ...]


def frontier(costs: Int[np.ndarray, " n"], losses: Float[np.ndarray, "L n"]) -> list[Choice]:
    """The choices that no other beats, by rising cost and falling loss.

    Exact, by dynamic programming over the costs that can be reached.

    Args:
        costs: of each option, the same in all layers.
        losses: of each option in each layer.
    """
    unit = math.gcd(*costs.tolist())
    steps = costs // unit
    best, chosen = np.zeros(1), []
    for layer in losses:
        reached = np.full((len(steps), len(best) + int(steps.max())), np.inf)
        for option, (step, loss) in enumerate(zip(steps.tolist(), layer.tolist(), strict=True)):
            reached[option, step : step + len(best)] = best + loss
        chosen.append(reached.argmin(0))
        best = reached.min(0)
    return [
        _choice(int(total), float(best[total]), steps, unit, chosen) for total in _falling(best)
    ]


def _falling(best: Float[np.ndarray, " c"]) -> Int[np.ndarray, " m"]:
    """The totals with less loss than all before them."""
    before = np.concatenate([[np.inf], np.minimum.accumulate(best)[:-1]])
    return np.flatnonzero(best < before)


def _choice(total: int, loss: float, steps, unit: int, chosen: list[np.ndarray]) -> Choice:
    """The way back from a total, layer by layer."""
    options, left = [], total
    for of_layer in reversed(chosen):
        options.append(int(of_layer[left]))
        left -= int(steps[options[-1]])
    return Choice(total * unit, loss, tuple(reversed(options)))
