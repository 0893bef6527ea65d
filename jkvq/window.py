"""The 16-bit windows of a sequence: its first tokens, and a ring of its most recent ones.

The ring has ``recent + page`` slots and holds the tokens not packed yet: from ``recent`` to
``recent + page - 1`` of them, once a sequence is that long.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from jkvq.pallas_kernels.words import from_words, to_words
from jkvq.spec import CacheSpec

Window = UInt[Array, "L R W K H"]


def slot_of(spec: CacheSpec, index: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The slot of a token of the ring, counted from the end of the sink."""
    return spec.sink + index % (spec.recent + spec.page)


def held_positions(spec: CacheSpec, length: Int[Array, " B"]) -> Int[Array, "B W"]:
    """The position of the newest token in each slot; negative where there is none."""
    slots = spec.recent + spec.page
    first = jnp.arange(spec.sink, dtype=jnp.int32)[None]
    first = jnp.where(first < length[:, None], first, -1)
    newest = length[:, None] - spec.sink - 1  # in the ring, counted from the sink
    index = newest - (newest - jnp.arange(slots, dtype=jnp.int32)[None]) % slots
    ring = jnp.where(index >= 0, index + spec.sink, -1)
    return jnp.concatenate([first, ring], axis=1)


def read_window(window: Window, layer: int, row: Int[Array, " B"]) -> Float[Array, "B W K H"]:
    """The tokens in all slots."""
    rows = jnp.minimum(row, window.shape[1] - 1)
    return from_words(window.at[layer, rows].get(mode="promise_in_bounds"))


def write_window(
    window: Window, layer: int, row: Int[Array, " B"], tokens: Float[Array, "B W K H"]
) -> Window:
    """The window with these tokens in all slots; a row past the end is dropped."""
    return window.at[layer, row].set(to_words(tokens, window.dtype), mode="drop")


def advance(
    spec: CacheSpec,
    old: Float[Array, "B W K H"],
    new: Float[Array, "B T K H"],
    length: Int[Array, " B"],
    count: Int[Array, " B"],
) -> Float[Array, "B W K H"]:
    """What the slots hold after ``count`` new tokens: the newest of each, the old elsewhere."""
    source = held_positions(spec, length + count) - length[:, None]  # in the chunk, if not negative
    taken = jnp.take_along_axis(new, jnp.maximum(source, 0)[..., None, None], axis=1)
    return jnp.where((source >= 0)[..., None, None], taken.astype(old.dtype), old)


def rounded(window: Window, tokens: Float[Array, "B T K H"]) -> Float[Array, "B T K H"]:
    """Tokens as the window would hold them."""
    return from_words(to_words(tokens, window.dtype))
