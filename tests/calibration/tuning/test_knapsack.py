import itertools

import numpy as np
import pytest

from jkvq.calibration.tuning.knapsack import frontier
from jkvq.calibration.tuning.widths import MOST_KINDS, Pair, Window, cache_of, choices


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_what_trying_all_finds(seed):
    rng = np.random.default_rng(seed)
    costs, losses = rng.integers(1, 9, 4) * 32, rng.uniform(size=(5, 4))
    every = {}
    for options in itertools.product(range(4), repeat=5):
        cost = int(costs[list(options)].sum())
        loss = float(losses[np.arange(5), list(options)].sum())
        every[cost] = min(every.get(cost, (np.inf,)), (loss, options))
    best, expected = np.inf, []
    for cost in sorted(every):
        if every[cost][0] < best - 1e-12:
            best = every[cost][0]
            expected.append((cost, every[cost][1]))
    found = frontier(costs, losses)
    assert [(each.cost, each.options) for each in found] == expected
    for each in found:
        np.testing.assert_allclose(each.loss, losses[np.arange(5), list(each.options)].sum())


def test_choices_have_few_kinds_of_layers_and_are_the_best_of_them():
    """Against all choices of the same kinds of layers."""
    rng = np.random.default_rng(0)
    # More bits, less loss: 2, 3, 4 and 8 bits of keys, then of values, of six layers
    losses = rng.uniform(0.5, 2, (8, 6)) * np.tile([1, 0.25, 0.06, 1e-4], 2)[:, None]
    found = choices(losses, 64)
    assert found[0][1] == (Pair(0, 0),) * 6
    assert found[-1][1] == (Pair(None, None),) * 6
    assert max(len(set(pairs)) for _, pairs in found) <= MOST_KINDS
    widths = {None: 16, 0: 2.5, 1: 3.5, 2: 4.5, 3: 8.5}  # with scale and lo, 32 bits for 64 numbers
    for choice, pairs in found[:: len(found) // 8]:
        assert choice.cost == 64 * sum(widths[k] + widths[v] for k, v in pairs)
        kinds, best = sorted(set(pairs), key=str), np.inf
        for other in itertools.product(kinds, repeat=6):
            if 64 * sum(widths[k] + widths[v] for k, v in other) <= choice.cost:
                best = min(best, _loss(losses, other))
        np.testing.assert_allclose(choice.loss, best)
        np.testing.assert_allclose(choice.loss, _loss(losses, pairs))


def _loss(losses: np.ndarray, pairs) -> float:
    key, value = losses[:4], losses[4:]
    total = 0.0
    for layer, (k, v) in enumerate(pairs):
        total += 0 if k is None else key[k, layer] + value[v, layer]
    return total


def test_a_cache_has_the_widths_that_were_chosen():
    pairs = (Pair(2, 1), Pair(0, 0), Pair(None, None), Pair(0, 0), Pair(2, 1), Pair(0, 0))
    spec = cache_of(pairs, Window(64, 64, 16))
    widths = [(own.key.bits, own.value.bits) for own in map(spec.of_layer, range(6))]
    assert widths == [(4, 3), (2, 2), (16, 16), (2, 2), (4, 3), (2, 2)]
    assert (spec.sink, spec.recent, spec.exact_layers) == (64, 64, (2,))
    assert spec.of_layer(1).key.digits == (2, 1, 1, 0)
