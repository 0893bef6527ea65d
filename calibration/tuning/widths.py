"""The ways in which a layer may be stored, and the cache that a choice among them makes."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from jkvq.cache.specs.presets import PRESETS
from jkvq.cache.specs.spec import EXACT, CacheSpec, OtherLayers, SideSpec
from jkvq.cache.stored import stored
from jkvq.calibration.tuning.knapsack import Choice, frontier

_NARROW = PRESETS["jkvq-int2"].spec
_WIDE = tuple(dataclasses.replace(_NARROW.value, bits=bits) for bits in (3, 4, 8))
KEYS = (_NARROW.key, *_WIDE)
VALUES = (_NARROW.value, *_WIDE)
MOST_KINDS = 4  # of layers: each has pages, plans and programs of its own


class Window(NamedTuple):
    """Tokens that are not packed, the first and the latest, and what they are held in."""

    sink: int
    recent: int
    window_bits: int


# At long contexts windows are cheap, and in 8 bits they cost hardly more KL than in 16.
WINDOWS = (
    *(Window(64, recent, 8) for recent in (64, 256, 448, 832, 1152)),
    Window(64, 256, 16),
)


class Pair(NamedTuple):
    """How a layer stores keys and values, by their places in KEYS and VALUES; None is exact."""

    key: int | None
    value: int | None


PAIRS = (*(Pair(k, v) for k in range(len(KEYS)) for v in range(len(VALUES))), Pair(None, None))


def side_options(window: Window) -> list[CacheSpec]:
    """Caches with keys alone coded in each way, then with values alone."""
    alone = [(key, EXACT) for key in KEYS] + [(EXACT, value) for value in VALUES]
    return [CacheSpec(*sides, **window._asdict()) for sides in alone]


def narrowest_alike(options: Sequence[CacheSpec]) -> list[CacheSpec]:
    """For each of ``side_options`` the narrowest of its kind: keys with as many digits, or values.

    What a wider code of one kind takes off is about the same in all layers.
    """
    first: dict[tuple, CacheSpec] = {}
    return [first.setdefault((each.key.codec, each.key.digits), each) for each in options]


def narrowest(window: Window) -> tuple[CacheSpec, CacheSpec]:
    """Caches with keys alone in the fewest bits, and with values alone."""
    options = side_options(window)
    return options[0], options[len(KEYS)]


def by_side(key: ArrayLike, value: ArrayLike) -> np.ndarray:
    """What keys have for each of ``side_options`` with coded keys, then what values have."""
    both = np.stack([key, value])
    return np.repeat(both, [len(KEYS), len(VALUES)], axis=0)


def choices(
    losses: Float[np.ndarray, "n L"], head_dim: int
) -> list[tuple[Choice, tuple[Pair, ...]]]:
    """The choices of widths that none beats, with few kinds of layers.

    ``losses`` are those of ``side_options``; what keys and values of all layers lose adds up.
    """
    few: dict[tuple[Pair, ...], list[tuple[Choice, tuple[Pair, ...]]]] = {}
    found = []
    for choice, pairs in _solved(losses, head_dim, PAIRS):
        used = tuple(pair for pair, _ in Counter(pairs).most_common(MOST_KINDS))
        if set(pairs) == set(used):
            found.append((choice, pairs))
            continue
        if used not in few:
            few[used] = _solved(losses, head_dim, used)
        found += [each for each in few[used] if each[0].cost <= choice.cost][-1:]
    return sorted(dict.fromkeys(found), key=lambda each: each[0][:2])


def _solved(losses, head_dim: int, pairs: Sequence[Pair]) -> list[tuple[Choice, tuple[Pair, ...]]]:
    cost = np.array([_bits(pair, head_dim) for pair in pairs])
    loss = np.stack([_loss(losses, pair) for pair in pairs], axis=1)
    return [(each, tuple(pairs[i] for i in each.options)) for each in frontier(cost, loss)]


def _bits(pair: Pair, head_dim: int) -> int:
    """Of a token and KV head."""
    sides = (_side(KEYS, pair.key), _side(VALUES, pair.value))
    kept = [stored(side, head_dim) for side in sides]
    return sum(16 * (each.codes + each.params) for each in kept)


def _side(options: Sequence[SideSpec], number: int | None) -> SideSpec:
    return EXACT if number is None else options[number]


def _loss(losses: Float[np.ndarray, "n L"], pair: Pair) -> Float[np.ndarray, " L"]:
    key, value = losses[: len(KEYS)], losses[len(KEYS) :]
    none = np.zeros(losses.shape[1])
    return (none if pair.key is None else key[pair.key]) + (
        none if pair.value is None else value[pair.value]
    )


def cache_of(pairs: Sequence[Pair], window: Window) -> CacheSpec:
    """The cache whose layers are stored so; most of them are its own, the others are named."""
    alike: dict[Pair, list[int]] = {}
    for layer, pair in enumerate(pairs):
        alike.setdefault(pair, []).append(layer)
    exact = tuple(alike.pop(Pair(None, None), ()))
    if not alike:
        return CacheSpec(EXACT, EXACT)
    (first, _), *rest = sorted(alike.items(), key=lambda item: -len(item[1]))
    others = sorted((tuple(layers), pair) for pair, layers in alike.items() if pair != first)
    assert len(others) == len(rest)
    return CacheSpec(
        *_sides(first),
        **window._asdict(),
        exact_layers=exact,
        other_layers=tuple(OtherLayers(layers, *_sides(pair)) for layers, pair in others),
    )


def _sides(pair: Pair) -> tuple[SideSpec, SideSpec]:
    return _side(KEYS, pair.key), _side(VALUES, pair.value)
