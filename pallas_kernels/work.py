"""Dividing attention over stored tokens into equal shares of work, whatever the sequences' lengths.

The work of all sequences is laid end to end in *units*, one tile of tokens each, and cut into equal
shares. A share may end inside a sequence and may span several: a program works through the
sequences of its share and leaves one partial result for each. Walking along, either the share or
the sequence moves on by one, so that (share j, sequence b) is partial result j + b: no two meet.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


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
    share = jnp.arange(shares, dtype=jnp.int32)
    start, stop = share_start(share, total, shares), share_start(share + 1, total, shares)
    first, last = (
        (end[None] <= unit[:, None]).sum(1, dtype=jnp.int32) for unit in (start, stop - 1)
    )
    last = jnp.where(start < stop, last, first - 1)
    some, busy = jnp.maximum(total, 1), jnp.minimum(shares, total)
    owner_first = ((begin + 1) * busy - 1) // some  # the share of a sequence's first unit
    owner_last = (end * busy - 1) // some
    count = jnp.where(units > 0, owner_last - owner_first + 1, 0)
    partial = owner_first + jnp.arange(len(units), dtype=jnp.int32)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), end])
    return Shares(before, first, last, partial, count)


def share_start(share, total, shares: int):
    """The first unit of a share; if there are fewer units than shares, the last have none."""
    busy = jnp.minimum(shares, total)
    return jnp.minimum(share, busy) * total // jnp.maximum(busy, 1)
