"""The paged KV cache: a pytree that every step takes, updates in place and returns."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jkvq.cache.shape import CacheShape
from jkvq.cache.sizes import PADDING_PAGE, roomy_table
from jkvq.cache.specs.spec import CacheSpec, SideSpec
from jkvq.cache.stored import stored
from jkvq.pallas_kernels.formats.packed import Packed

# Tokens that a sequence may get before the next look at what is due to be packed, and before that
# look is taken note of.
PACK_EVERY = 32
_UNSEEN = 2 * PACK_EVERY


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExactPages:
    """Pages of the windows: of the sink, of recent tokens and of the page that fills."""

    key: Packed
    value: Packed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerGroup:
    """The storage of the layers that share a spec, stacked on the leading axis.

    One buffer holds a kind of array of all layers, and is updated in place.
    """

    key: Packed
    value: Packed
    exact: ExactPages | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sequences:
    """Which sequences are in a step, and where their tokens are stored.

    Token i of sequence b lies in page ``block_table[b, i // p]``, slot ``i % p``, where it is
    packed, and in page ``exact_table[b, i // p]``, the same slot, where it is in a window. Which of
    them it is follows from ``length`` (specs/page_rule.py); for a while it is both. Layers with a
    window have packed pages of their own, by ``local_table``.
    """

    block_table: Int[Array, "B M"]
    exact_table: Int[Array, "B M"] | None  # None without windows
    length: Int[Array, " B"]  # tokens stored
    local_table: Int[Array, "B M"] | None = None  # None without such layers

    def longer_by(self, count: Int[Array, " B"]) -> "Sequences":
        """With so many more tokens stored."""
        return dataclasses.replace(self, length=self.length + count)

    def packed_table(self, window: int | None) -> Int[Array, "B M"]:
        """Where layers that see so many tokens have their packed ones; None is all."""
        table = self.block_table if window is None else self.local_table
        assert table is not None
        return table


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of a batch of sequences, in pages of a shared pool."""

    groups: tuple[LayerGroup, ...]  # as ``layer_groups`` has them
    sequences: Sequences
    spec: CacheSpec = field(metadata={"static": True})
    windows: tuple[int | None, ...] = field(default=(), metadata={"static": True})  # of layers

    @property
    def layers(self) -> int:
        return sum(group.key.codes.shape[0] for group in self.groups)


class Place(NamedTuple):
    """Where a layer of the model is stored."""

    group: int
    layer: int  # among those of the group


class GroupSpec(NamedTuple):
    """How the layers of a group are stored, and which ones they are."""

    spec: CacheSpec
    layers: tuple[int, ...]
    window: int | None = None  # tokens that they see; None is all


# Every step asks for every layer's place.
@functools.lru_cache(maxsize=256)
def layer_groups(
    spec: CacheSpec, layers: int, windows: tuple[int | None, ...] = ()
) -> tuple[GroupSpec, ...]:
    """The coded layers, by how they are coded, and the exact ones, each by their windows."""
    windows = windows or (None,) * layers
    coded = [spec, *spec.other_layers]
    order = {sides: i for i, sides in enumerate((own.key, own.value) for own in coded)}
    kinds: dict[tuple[int, bool, int], list[int]] = {}
    for layer in range(layers):
        exact, own = layer in spec.exact_layers, spec.of_layer(layer)
        place = 0 if exact else order[own.key, own.value]
        kinds.setdefault((windows[layer] or 0, exact, place), []).append(layer)
    return tuple(
        GroupSpec(spec.of_layer(own[0]), tuple(own), windows[own[0]])
        for _, own in sorted(kinds.items())
    )


@functools.lru_cache(maxsize=4096)
def place_of(
    spec: CacheSpec, layers: int, layer: int, windows: tuple[int | None, ...] = ()
) -> Place:
    """Where a layer is stored."""
    for number, group in enumerate(layer_groups(spec, layers, windows)):
        if layer in group.layers:
            return Place(number, group.layers.index(layer))
    raise IndexError(f"layer {layer} of {layers}")


def abstract_groups(
    spec: CacheSpec, shape: CacheShape, pages: int, exact_pages: int, local_pages: int = 0
) -> tuple[LayerGroup, ...]:
    """Shapes and dtypes of everything stored: what ``empty_cache`` allocates."""
    return tuple(
        _abstract_group(
            group.spec,
            shape._replace(layers=len(group.layers)),
            pages if group.window is None else local_pages,
            exact_pages,
        )
        for group in layer_groups(spec, shape.layers, shape.windows)
    )


def _abstract_group(spec: CacheSpec, shape: CacheShape, pages: int, exact_pages: int) -> LayerGroup:
    L, K = shape.layers, shape.kv_heads

    def packed(side: SideSpec, channels: int, pages: int) -> Packed:
        kept = stored(side, channels)
        tile = (kept.codes, spec.page) if kept.stream else (spec.page, kept.codes)
        return Packed(
            _abstract((L, pages, K, *tile), kept.dtype),
            _abstract((L, pages, K, kept.params, spec.page), np.uint16) if kept.params else None,
            _abstract((L, pages, spec.page), kept.centroid) if kept.centroid else None,
            kept.stream,
        )

    channels, windows = (shape.head_dim, shape.value_dim), None
    if spec.windowed:
        key, value = map(packed, spec.window_sides, channels, (exact_pages, exact_pages))
        windows = ExactPages(key, value)
    key, value = map(packed, (spec.key, spec.value), channels, (pages, pages))
    return LayerGroup(key, value, windows)


def _abstract(shape: tuple[int, ...], dtype) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def pages_of_window(spec: CacheSpec) -> int:
    """Pages of windows that a sequence has at most while tokens are added; 0 without windows."""
    return spec.exact_pages - (-(_UNSEEN - 1) // spec.page) if spec.windowed else 0


def pages_of_local(spec: CacheSpec, window: int | None) -> int:
    """Packed pages that a sequence has at most in layers of this window while tokens are added."""
    if window is None:
        return 0
    tokens = window - 1 + _UNSEEN - (0 if spec.exact_layers else spec.recent)
    return max(0, 1 - (-tokens // spec.page))


def first_page(spec: CacheSpec) -> int:
    """The first page of a sequence that is ever stored in the pool of packed pages."""
    return 0 if spec.exact_layers else spec.sink_pages


def pages_for(tokens: int, spec: CacheSpec) -> int:
    """Pages that one sequence of ``tokens`` tokens needs, beside its window's."""
    if spec.windowed and not spec.exact_layers:
        return spec.packed(tokens) // spec.page
    return -(-tokens // spec.page)


def stored_bytes(
    spec: CacheSpec, shape: CacheShape, pages: int, exact_pages: int, local_pages: int = 0
) -> int:
    """Bytes of so many pages of each kind, over all layers that have it."""
    leaves = jax.tree.leaves(abstract_groups(spec, shape, pages, exact_pages, local_pages))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def empty_cache(
    spec: CacheSpec, shape: CacheShape, pages: int, block_table: Int[Array, "B M"]
) -> KVCache:
    """A cache of ``pages`` pages, the padding page among them, that stores nothing yet.

    Every row has pages of windows of its own, which serve its recent tokens in turn. Layers with a
    window keep what they no longer see: their pages are those of the table too.
    """
    rows, columns = block_table.shape
    groups = empty_groups(spec, shape, pages, 1 + rows * pages_of_window(spec), pages)
    exact_table = jax.device_put(pages_in_turn(spec, rows, columns)) if spec.windowed else None
    length = jax.device_put(np.zeros(rows, np.int32))
    local = None if shape.window is None else block_table
    return KVCache(groups, Sequences(block_table, exact_table, length, local), spec, shape.windows)


def pages_in_turn(spec: CacheSpec, rows: int, columns: int) -> Int[np.ndarray, "rows columns"]:
    """A table of pages of windows: those of the sink, then the others of each row over and over."""
    own, number = pages_of_window(spec), np.arange(columns)
    behind = number - spec.sink_pages
    turn = np.where(behind < 0, number, spec.sink_pages + behind % (own - spec.sink_pages))
    return (1 + own * np.arange(rows)[:, None] + turn[None]).astype(np.int32)


def fill_table(
    spec: CacheSpec, pages: Sequence[Sequence[int]], columns: int
) -> Int[np.ndarray, "rows columns"]:
    """The block table of sequences with these pages, each sequence's in their order."""
    table = np.full((len(pages), columns), PADDING_PAGE, np.int32)
    for row, own in enumerate(pages):
        table[row, first_page(spec) : first_page(spec) + len(own)] = own
    return table


def table_columns(tokens: int, spec: CacheSpec) -> int:
    """The width of a table for sequences of so many tokens."""
    return roomy_table(-(-tokens // spec.page), spec.page)


# One program, and not one for each shape
@functools.partial(jax.jit, static_argnums=range(5))
def empty_groups(
    spec: CacheSpec, shape: CacheShape, pages: int, exact_pages: int, local_pages: int = 0
) -> tuple[LayerGroup, ...]:
    """Pools of so many pages that store nothing yet."""
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        abstract_groups(spec, shape, pages, exact_pages, local_pages),
    )


def page_of(
    table: Int[Array, "B M"], position: Int[Array, "B T"], real, page: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """(page, slot) of tokens, in pages of so many.

    What is not real or lies off the table goes to the padding page.
    """
    columns = table.shape[1]
    column = position >> (page.bit_length() - 1)  # a power of two
    found = jnp.take_along_axis(table, jnp.clip(column, 0, columns - 1), axis=1)
    real = real & (column >= 0) & (column < columns)
    return jnp.where(real, found, PADDING_PAGE), position & (page - 1)
