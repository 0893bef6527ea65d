"""The affine quantizer on the tiles of a kernel: affine.py's definitions, piece by piece.

A block of tokens comes as one tile [tokens, width] for each piece (unpack.py). What is needed of a
group of channels is first combined tile with tile, then reduced once along the channels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax

from jkvq.pallas_kernels.affine import GAUSSIAN_STEP, REFITS
from jkvq.pallas_kernels.unpack import Piece
from jkvq.pallas_kernels.words import as_bfloat16


@dataclass(frozen=True)
class Grouped:
    """Tiles, and the pieces they are of."""

    tiles: list
    pieces: list[Piece]

    def each(self, function: Callable, *by_group) -> "Grouped":
        """A function of each tile and of its group's numbers [tokens, 1]."""
        return Grouped(
            [
                function(tile, *(numbers[piece.group] for numbers in by_group))
                for tile, piece in zip(self.tiles, self.pieces, strict=True)
            ],
            self.pieces,
        )

    def times(self, other: "Grouped") -> "Grouped":
        products = [a * b for a, b in zip(self.tiles, other.tiles, strict=True)]
        return Grouped(products, self.pieces)

    def reduce(self, combine: Callable, along: Callable) -> list:
        """For each group its tiles combined, then reduced along the channels, [tokens, 1]."""
        groups: dict[int, object] = {}
        for tile, piece in zip(self.tiles, self.pieces, strict=True):
            found = groups.get(piece.group)
            groups[piece.group] = tile if found is None else combine(found, tile)
        return [along(groups[n])[:, None] for n in sorted(groups)]

    def sum(self) -> list:
        return self.reduce(jnp.add, lambda tile: tile.sum(1))

    def max(self) -> list:
        return self.reduce(jnp.maximum, lambda tile: tile.max(1))

    def min(self) -> list:
        return self.reduce(jnp.minimum, lambda tile: tile.min(1))


def clip_tiles(x: Grouped, quantile, channels: int) -> Grouped:
    """Clamps each token to a quantile of its magnitudes: takes the greatest away, one by one."""
    pieces = [piece._replace(group=0) for piece in x.pieces]  # the whole head, whatever the groups
    magnitude = Grouped([jnp.abs(tile) for tile in x.tiles], pieces)
    rank = quantile * (channels - 1)
    below = jnp.floor(rank)
    part = rank - below
    wanted = channels - 1 - below  # how many are greater than the one at ``below``

    def take(_, carry):
        """The next smaller of the magnitudes while fewer than ``wanted`` are taken."""
        found, above, taken = carry
        (smaller,) = magnitude.each(lambda t: jnp.where(t < found, t, -1.0)).max()
        (equal,) = magnitude.each(lambda t: jnp.where(t == found, 1.0, 0.0)).sum()
        goes_on = taken + equal <= wanted
        above = jnp.where(taken < wanted, found, above)
        return (
            jnp.where(goes_on, smaller, found),
            above,
            jnp.where(goes_on, taken + equal, taken),
        )

    (top,) = magnitude.max()
    start = top, top, jnp.zeros_like(top)
    found, above, _ = lax.fori_loop(0, wanted.astype(jnp.int32), take, start)
    limit = found * (1 - part) + above * part
    return x.each(lambda tile: jnp.minimum(jnp.maximum(tile, -limit), limit))


def encode_min_max(x: Grouped, bits: int, group: int):
    """(codes, scale, lo): see affine.encode_min_max."""
    lo, top = x.min(), 2**bits - 1
    scale = [as_bfloat16((hi - low) / top) for hi, low in zip(x.max(), lo, strict=True)]
    lo = [as_bfloat16(low) for low in lo]
    return _levels(x, scale, lo, bits), scale, lo


def encode_fitted(x: Grouped, bits: int, group: int):
    """(codes, scale, lo): see affine.encode_fitted."""
    total, squares = x.sum(), x.times(x).sum()
    mean = [t / group for t in total]
    deviation = [sum_ / group for sum_ in x.each(lambda t, m: (t - m) * (t - m), mean).sum()]
    scale = [GAUSSIAN_STEP[bits] * jnp.sqrt(d) for d in deviation]
    lo = [m - s * ((2**bits - 1) / 2) for m, s in zip(mean, scale, strict=True)]
    for _ in range(REFITS):
        codes = _levels(x, scale, lo, bits)
        sums = codes.sum(), codes.times(codes).sum(), codes.times(x).sum()
        fits = [
            _least_squares(*numbers, group) for numbers in zip(scale, lo, mean, *sums, strict=True)
        ]
        scale, lo = ([fit[i] for fit in fits] for i in (0, 1))
    codes = _levels(x, scale, lo, bits)
    # <x^, x> = lo sum(x) + scale <codes, x>
    shrunk = [
        low * t + s * product
        for low, t, s, product in zip(lo, total, scale, codes.times(x).sum(), strict=True)
    ]
    stretch = [
        jnp.where(s > 0, square / jnp.where(s > 0, s, 1.0), 1.0)
        for s, square in zip(shrunk, squares, strict=True)
    ]
    scale, lo = (
        [as_bfloat16(n * s) for n, s in zip(numbers, stretch, strict=True)]
        for numbers in (scale, lo)
    )
    return codes, scale, lo


def _least_squares(scale, lo, mean, code_sum, code_squares, products, group: int):
    code_mean = code_sum / group
    spread = code_squares - code_sum * code_mean
    slope = (products - code_sum * mean) / jnp.where(spread > 0, spread, 1.0)
    fits = (spread > 0) & (slope > 0)
    return jnp.where(fits, slope, scale), jnp.where(fits, mean - slope * code_mean, lo)


def _levels(x: Grouped, scale: list, lo: list, bits: int) -> Grouped:
    """The nearest level of each value, as a float."""
    per_step = [jnp.where(s > 0, 1.0 / jnp.where(s > 0, s, 1.0), 0.0) for s in scale]
    shift = [0.5 - low * step for low, step in zip(lo, per_step, strict=True)]
    top = 2.0**bits - 1

    def level(tile, step, offset):
        return jnp.minimum(jnp.maximum(jnp.floor(tile * step + offset), 0.0), top)

    return x.each(level, per_step, shift)


def pack_tiles(codes: Grouped, parts: list[list[Piece]]) -> list:
    """(first word, words) of each run of words that the codes fill."""
    codes = [tile.astype(jnp.int32) for tile in codes.tiles]
    found, shift = [], 0
    for part in parts:
        runs: dict[int, object] = {}
        for tile, piece in zip(codes, part, strict=True):
            bits = (tile >> shift) & ((1 << piece.bits) - 1)
            place = piece.shift + piece.place
            if piece.wrap is not None:  # several planes side by side
                column = lax.broadcasted_iota(jnp.int32, tile.shape, 1)
                place = place + piece.bits * (column // piece.words)
            runs[piece.word] = runs.get(piece.word, 0) + (bits << place)
        for word, words in runs.items():
            planes = words.reshape(words.shape[0], -1, part[0].words)
            whole = words if part[0].wrap is None else planes.sum(1)
            found.append((word, whole.astype(jnp.uint16)))
        shift += part[0].bits
    return found
