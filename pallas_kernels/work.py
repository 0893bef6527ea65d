"""Dividing attention over stored tokens into equal shares of work, whatever the sequences' lengths.

The work of all sequences is laid end to end in *units*, one tile of tokens each, and cut into equal
shares. A share may end inside a sequence and may span several: a program works through the
sequences of its share and leaves one partial result for each. Walking along, either the share or
the sequence moves on by one, so that (share j, sequence b) is partial result j + b: no two meet.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkvq.pallas_kernels.formats.codecs import Codec
from jkvq.pallas_kernels.formats.packed import Packed
from jkvq.pallas_kernels.types import DecodeSettings, Shift


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shares:
    """Who does what.

    before: units before each sequence, and at the end their number.
    first, last: the sequences of each share; last < first where it has none.
    partial, count: the first partial result of each sequence, and how many it has.
    """

    before: Int[Array, " B+1"]
    first: Int[Array, " J"]
    last: Int[Array, " J"]
    partial: Int[Array, " B"]
    count: Int[Array, " B"]


def share_work(units: Int[Array, " B"], shares: int) -> Shares:
    """Cuts the units of all sequences into so many shares, equal but for one unit."""
    end = jnp.cumsum(units, dtype=jnp.int32)
    begin, total = end - units, end[-1]
    edge = share_start(jnp.arange(shares + 1, dtype=jnp.int32), total, shares)
    start, stop = edge[:-1], edge[1:]
    first, last = (_count_until(end, unit) for unit in (start, stop - 1))
    last = jnp.where(start < stop, last, first - 1)
    # The shares of a sequence's first and last unit; shares without units begin at the end.
    owner_first, owner_last = (_count_until(start, unit) - 1 for unit in (begin, end - 1))
    count = jnp.where(units > 0, owner_last - owner_first + 1, 0)
    partial = owner_first + jnp.arange(len(units), dtype=jnp.int32)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), end])
    return Shares(before, first, last, partial, count)


def share_start(share, total, shares: int):
    """The first unit of a share; if there are fewer units than shares, the last have none.

    That is share * total // busy, by parts, as the product would not fit in 32 bits.
    """
    busy = jnp.maximum(jnp.minimum(shares, total), 1)
    share = jnp.minimum(share, jnp.minimum(shares, total))
    return share * (total // busy) + share * (total % busy) // busy


def _count_until(ends: Int[Array, " n"], unit: Int[Array, " m"]) -> Int[Array, " m"]:
    """How many of these lie at or before each unit."""
    return (ends[None] <= unit[:, None]).sum(1, dtype=jnp.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodePlan:
    """What the queries of a step see of one kind of pages, and who reads it.

    length: tokens of each sequence.
    first: of them that is seen; None where all are. Units before it are left out.
    tiles: of all units, one after the other, as Mosaic's kernel wants them.
    settings: of Triton's kernel.
    """

    length: Int[Array, " B"]
    shares: Shares
    tiles: Int[Array, " units"] | None = None
    settings: DecodeSettings | None = field(default=None, metadata={"static": True})
    first: Int[Array, " B"] | None = None


def units_of(
    length: Int[Array, " B"], first: Int[Array, " B"] | None, size: int
) -> tuple[Int[Array, " B"], Int[Array, " B"] | None]:
    """Units of ``size`` tokens that hold seen ones, and those before them that are skipped."""
    units = -(-length // size)
    if first is None:
        return units, None
    skipped = jnp.minimum(first // size, units)
    return units - skipped, skipped


def tiles_in_order(
    shares: Shares,
    table: Int[Array, "B M"],
    of_page: int,
    skipped: Int[Array, " B"] | None = None,
) -> Int[Array, " units"]:
    """The tile of every unit, of as many as there can be; any tile past the last one.

    Tiles are counted through all pages, ``of_page`` to each; some of each sequence are ``skipped``.
    """
    unit = jnp.arange(table.size * of_page, dtype=jnp.int32)
    row = jnp.minimum(_count_until(shares.before[1:], unit), len(table) - 1)
    tile = unit - shares.before[row] + (0 if skipped is None else skipped[row])
    tile = jnp.clip(tile, 0, table.shape[1] * of_page - 1)
    return table[row, tile // of_page] * of_page + tile % of_page


class Span(NamedTuple):
    """Pages of one format that a step reads: the keys and values, by whom, and what is added."""

    keys: Packed
    values: Packed
    codecs: tuple[Codec, Codec]
    table: Int[Array, "B M"]
    plan: DecodePlan
    shift: Shift | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Partials:
    """Partial results: row r N + n is query head n of partial result r; lse is to base 2."""

    out: Float[Array, "rows H"]
    lse: Float[Array, " rows"]
    shares: Shares


def one_each(out: Float[Array, "B N H"], lse: Float[Array, "B N"]) -> Partials:
    """A partial result of every sequence that was found elsewhere; its lse is a natural one."""
    number = jnp.arange(len(out), dtype=jnp.int32)
    shares = Shares(jnp.arange(len(out) + 1), number, number, number, jnp.ones_like(number))
    rows = out.astype(jnp.float32).reshape(-1, out.shape[-1])
    return Partials(rows, lse.reshape(-1) / math.log(2), shares)
