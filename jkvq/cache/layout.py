"""The paged KV cache: a pytree that every step takes, updates in place and returns."""

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

from jkvq.cache.page_pool import PADDING_PAGE
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec import CacheSpec, SideSpec
from jkvq.cache.stored import stored
from jkvq.pallas_kernels.formats.packed import Packed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Windows:
    """The 16-bit tokens of every sequence: its first ``sink``, then a ring of ``recent + page``.

    Stored as pages of whole floats. The first page takes the writes of padding, then each row of
    the batch has its own (windows.py).
    """

    key: UInt[Array, "L P K p H"]
    value: UInt[Array, "L P K p H"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerGroup:
    """The storage of the layers that share a spec, stacked on the leading axis.

    One buffer holds a kind of array of all layers, and is updated in place.
    """

    key: Packed
    value: Packed
    windows: Windows | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sequences:
    """Which sequences are in a step, and where their tokens are stored.

    Packed token i of sequence b lies in page ``block_table[b, i // p]``, slot ``i % p``; packed
    tokens are counted from the end of the sink. Everything else follows from ``length``.
    """

    block_table: Int[Array, "B M"]
    row: Int[Array, " B"]  # of the windows; -1 for padding
    length: Int[Array, " B"]  # tokens stored

    def longer_by(self, count: Int[Array, " B"]) -> "Sequences":
        """With so many more tokens stored."""
        return dataclasses.replace(self, length=self.length + count)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of a batch of sequences, in pages of a shared pool."""

    groups: tuple[LayerGroup, ...]  # of the coded layers and of the exact ones, where there are any
    sequences: Sequences
    spec: CacheSpec = field(metadata={"static": True})

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


# Every step asks for every layer's place.
@functools.lru_cache(maxsize=256)
def layer_groups(spec: CacheSpec, layers: int) -> tuple[GroupSpec, ...]:
    """The coded layers and the exact ones, where there are any."""
    exact = tuple(sorted(spec.exact_layers))
    coded = tuple(layer for layer in range(layers) if layer not in exact)
    groups = GroupSpec(spec.without_exact_layers, coded), GroupSpec(spec.exact, exact)
    return tuple(group for group in groups if group.layers)


@functools.lru_cache(maxsize=4096)
def place_of(spec: CacheSpec, layers: int, layer: int) -> Place:
    """Where a layer is stored."""
    for number, group in enumerate(layer_groups(spec, layers)):
        if layer in group.layers:
            return Place(number, group.layers.index(layer))
    raise IndexError(f"layer {layer} of {layers}")


def abstract_groups(
    spec: CacheSpec, shape: CacheShape, pages: int, window_pages: int
) -> tuple[LayerGroup, ...]:
    """Shapes and dtypes of everything stored: what ``empty_cache`` allocates."""
    return tuple(
        _abstract_group(group.spec, shape._replace(layers=len(group.layers)), pages, window_pages)
        for group in layer_groups(spec, shape.layers)
    )


def _abstract_group(
    spec: CacheSpec, shape: CacheShape, pages: int, window_pages: int
) -> LayerGroup:
    L, K, H = shape

    def packed(side: SideSpec) -> Packed:
        kept = stored(side, H)
        tile = (kept.codes, spec.page) if kept.stream else (spec.page, kept.codes)
        return Packed(
            _abstract((L, pages, K, *tile), kept.dtype),
            _abstract((L, pages, K, kept.params, spec.page), np.uint16) if kept.params else None,
            _abstract((L, pages, spec.page), kept.centroid) if kept.centroid else None,
            kept.stream,
        )

    def window(side: SideSpec):
        words = np.uint32 if side.bits == 32 else np.uint16
        return _abstract((L, window_pages, K, spec.page, H), words)

    windows = Windows(window(spec.key), window(spec.value)) if spec.windowed else None
    return LayerGroup(packed(spec.key), packed(spec.value), windows)


def _abstract(shape: tuple[int, ...], dtype) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def pages_of_window(spec: CacheSpec) -> int:
    """Pages of 16-bit tokens that every sequence has; 0 without windows."""
    return -(-(spec.sink + spec.recent + spec.page) // spec.page) if spec.windowed else 0


def pages_for(tokens: int, spec: CacheSpec) -> int:
    """Pages that one sequence of ``tokens`` tokens needs, beside its window's."""
    if spec.windowed and not spec.exact_layers:
        return spec.packed(tokens) // spec.page
    return -(-tokens // spec.page)


def stored_bytes(spec: CacheSpec, shape: CacheShape, pages: int, window_pages: int) -> int:
    """Bytes of so many pages, over all layers."""
    leaves = jax.tree.leaves(abstract_groups(spec, shape, pages, window_pages))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def empty_cache(
    spec: CacheSpec, shape: CacheShape, pages: int, block_table: Int[Array, "B M"]
) -> KVCache:
    """A cache of ``pages`` pages, the padding page among them, that stores nothing yet."""
    rows = block_table.shape[0]
    groups = _empty_groups(spec, shape, pages, 1 + rows * pages_of_window(spec))
    row, length = (jax.device_put(f(rows, dtype=np.int32)) for f in (np.arange, np.zeros))
    return KVCache(groups, Sequences(block_table, row, length), spec)


# One program, and not one for each shape
@functools.partial(jax.jit, static_argnums=range(4))
def _empty_groups(
    spec: CacheSpec, shape: CacheShape, pages: int, window_pages: int
) -> tuple[LayerGroup, ...]:
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        abstract_groups(spec, shape, pages, window_pages),
    )


def page_of(
    block_table: Int[Array, "B M"], index: Int[Array, "B T"], real, page: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """(page, slot) of packed tokens by their index, in pages of so many tokens.

    What is not real or lies off the table goes to the padding page.
    """
    columns = block_table.shape[1]
    column = index >> (page.bit_length() - 1)  # a power of two
    found = jnp.take_along_axis(block_table, jnp.clip(column, 0, columns - 1), axis=1)
    real = real & (column >= 0) & (column < columns)
    return jnp.where(real, found, PADDING_PAGE), index & (page - 1)
