"""Block-GTQ's widths: more bits for the rotary blocks of keys that matter more."""

import numpy as np
from jaxtyping import Float, Int, UInt8

from jkvq.cache.stored import BLOCK_GROUPS

WIDEST = 8
SCORES = {
    "qk_avg": lambda q, k: (q + k) / 2,
    "qk_max": np.maximum,
    "qk_product": lambda q, k: q * k,
    "k_only": lambda q, k: k,
    "q_only": lambda q, k: q,
}


def greedy(
    score: Float[np.ndarray, " n"], bits: int, least: int = 1, most: int = WIDEST
) -> Int[np.ndarray, " n"]:
    """Widths from ``least`` to ``most`` that add up to ``bits`` and have the least ``cost``.

    Each bit goes where it lowers the cost most, (3/4) s 4^-b, the first of equals. As each block's
    gains fall from bit to bit, no other way to spend the bits is better.
    """
    widths = np.full(len(score), least)
    for _ in range(bits - least * len(score)):
        gain = np.where(widths < most, score * 0.25**widths, -1.0)
        widths[gain.argmax()] += 1
    return widths


def cost(score: Float[np.ndarray, " n"], widths: Int[np.ndarray, " n"]) -> float:
    """sum_i s_i 4^-b_i."""
    return float((score * 0.25**widths).sum())


def allocate(score: Float[np.ndarray, " n"], bits: int) -> Int[np.ndarray, " n"]:
    """The cheapest widths of 1 to 8 bits that a head may have.

    It stores a norm for each different width, ``BLOCK_GROUPS`` at most: where the greedy uses
    more, the best run of so many neighbouring widths is taken.
    """
    widths = greedy(score, bits)
    if len(np.unique(widths)) <= BLOCK_GROUPS:
        return widths
    runs = [(low, low + BLOCK_GROUPS - 1) for low in range(1, WIDEST - BLOCK_GROUPS + 2)]
    found = [
        greedy(score, bits, low, high)
        for low, high in runs
        if low * len(score) <= bits <= high * len(score)
    ]
    return min(found, key=lambda widths: cost(score, widths))


def allocations(score: Float[np.ndarray, "L K n"]) -> UInt8[np.ndarray, "8 L K n"]:
    """The widths of every head for averages of 1 to 8 bits."""
    L, K, n = score.shape
    widths = np.zeros((WIDEST, L, K, n), np.uint8)
    for average, layer, head in np.ndindex(WIDEST, L, K):
        widths[average, layer, head] = allocate(score[layer, head], (average + 1) * n)
    return widths
