"""The 16-bit windows of a sequence: its first tokens, and a ring of its most recent ones.

They hold float16 numbers, four times finer than bfloat16 (float32 in a cache of float32).
The ring has ``recent + page`` slots and holds the tokens not packed yet: from ``recent`` to
``recent + page - 1`` of them, once a sequence is that long.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jkvq.cache.layout import pages_of_window
from jkvq.cache.page_pool import PADDING_PAGE
from jkvq.cache.specs.spec import CacheSpec
from jkvq.pallas_kernels.formats.packed import LayerIndex
from jkvq.pallas_kernels.formats.words import from_words, to_words

Window = UInt[Array, "L P K p H"]


def slot_of(spec: CacheSpec, index: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The slot of a token of the ring, counted from the end of the sink."""
    return spec.sink + index % (spec.recent + spec.page)


def window_slots(spec: CacheSpec) -> int:
    """Slots of a sequence: its windows, filled up to whole pages."""
    return pages_of_window(spec) * spec.page


def window_table(spec: CacheSpec, row: Int[Array, " B"]) -> Int[Array, "B n"]:
    """The pages of each row's windows; the padding page for a row that is not real."""
    pages = pages_of_window(spec)
    own = 1 + row[:, None] * pages + jnp.arange(pages, dtype=jnp.int32)[None]
    return jnp.where(row[:, None] >= 0, own, PADDING_PAGE)


def held_positions(spec: CacheSpec, length: Int[Array, " B"]) -> Int[Array, "B W"]:
    """The position of the newest token in each slot; negative where there is none."""
    slots = spec.recent + spec.page
    first = jnp.arange(spec.sink, dtype=jnp.int32)[None]
    first = jnp.where(first < length[:, None], first, -1)
    newest = length[:, None] - spec.sink - 1  # in the ring, counted from the sink
    index = newest - (newest - jnp.arange(slots, dtype=jnp.int32)[None]) % slots
    ring = jnp.where(index >= 0, index + spec.sink, -1)
    held = jnp.concatenate([first, ring], axis=1)
    return jnp.pad(held, ((0, 0), (0, window_slots(spec) - held.shape[1])), constant_values=-1)


def _floats(window: Window):
    return jnp.float16 if window.dtype == jnp.uint16 else jnp.float32


def read_window(
    window: Window, layer: LayerIndex, table: Int[Array, "B n"]
) -> Float[Array, "B W K H"]:
    """The tokens in all slots."""
    pages = window.at[layer, table].get(mode="promise_in_bounds")
    B, n, K, p, H = pages.shape
    return from_words(pages, _floats(window)).swapaxes(2, 3).reshape(B, n * p, K, H)


def write_window(
    window: Window,
    layer: LayerIndex,
    table: Int[Array, "B n"],
    tokens: Float[Array, "B W K H"],
) -> Window:
    """The window with these tokens in all slots."""
    (B, n), (K, p, H) = table.shape, window.shape[2:]
    pages = to_words(tokens, _floats(window)).reshape(B, n, p, K, H).swapaxes(2, 3)
    return window.at[layer, table].set(pages, mode="promise_in_bounds")


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
    return from_words(to_words(tokens, _floats(window)), _floats(window))


def seen_exactly(
    spec: CacheSpec, position: Int[Array, "B S"], boundary: Int[Array, "B T"]
) -> Bool[Array, "B T S"]:
    """Which exact tokens, by position, each query with a boundary reads exactly."""
    position = position[:, None]
    kept = (position < spec.sink) | (position - spec.sink >= boundary[..., None])
    return (position >= 0) & kept


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Leaving:
    """The ring's tokens that a chunk may drive out, by their index; and which of them it does."""

    index: Int[Array, "B n"]
    leaves: Bool[Array, "B n"]
    after: Int[Array, "B 1"]  # packed tokens once the chunk is stored


def leaving(
    spec: CacheSpec, length: Int[Array, " B"], count: Int[Array, " B"], width: int
) -> Leaving:
    """What a chunk of ``count`` tokens, at most ``width``, drives out."""
    before, after = spec.packed(length)[:, None], spec.packed(length + count)[:, None]
    most = min(spec.recent + spec.page, -(-width // spec.page) * spec.page)
    index = before + jnp.arange(most, dtype=jnp.int32)[None]
    return Leaving(index, (index < after) & (index < length[:, None] - spec.sink), after)
