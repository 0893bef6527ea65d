"""The paged KV cache: a pytree that every step takes, updates in place and returns."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

from jkvq.cache.page_pool import PADDING_PAGE
from jkvq.cache.shape import CacheShape
from jkvq.cache.spec import CacheSpec, SideSpec
from jkvq.cache.stored import stored
from jkvq.pallas_kernels.formats.packed import Packed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Windows:
    """The exact tokens of every sequence: its first ``sink``, then a ring of ``recent + page``.

    Stored as pages of whole floats, a fixed number n of them for each row.
    """

    key: UInt[Array, "L R*n K p H"]
    value: UInt[Array, "L R*n K p H"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stack:
    """The storage of the layers that share a spec, stacked on the leading axis.

    One buffer holds a kind of array of all layers, and is updated in place.
    """

    key: Packed
    value: Packed
    windows: Windows | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of a batch of sequences, in pages of a shared pool.

    Packed token i of sequence b lies in page ``block_table[b, i // p]``, slot ``i % p``; packed
    tokens are counted from the end of the sink. Everything else follows from ``length``.
    """

    stacks: tuple[Stack, ...]  # of the coded layers and of the exact ones, as far as there are any
    block_table: Int[Array, "B M"]
    row: Int[Array, " B"]  # of the windows; past the end for padding
    length: Int[Array, " B"]  # tokens stored
    spec: CacheSpec = field(metadata={"static": True})


class Home(NamedTuple):
    """Where a layer is stored."""

    stack: int
    layer: int  # in the stack


def home(spec: CacheSpec, layer: int) -> Home:
    """Where a layer is stored: exact layers have a stack of their own, the last."""
    exact = sorted(spec.exact_layers)
    if layer in exact:
        return Home(-1, exact.index(layer))
    return Home(0, layer - sum(other < layer for other in exact))


def abstract_stacks(spec: CacheSpec, shape: CacheShape, pages: int, rows: int) -> tuple[Stack, ...]:
    """Shapes and dtypes of everything stored: what ``empty_cache`` allocates."""
    exact = len(spec.exact_layers)
    parts = [(spec.without_exact_layers, shape.layers - exact), (spec.exact, exact)]
    return tuple(
        _abstract_stack(part, shape._replace(layers=layers), pages, rows)
        for part, layers in parts
        if layers
    )


def _abstract_stack(spec: CacheSpec, shape: CacheShape, pages: int, rows: int) -> Stack:
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
        return _abstract((L, rows * window_pages(spec), K, spec.page, H), words)

    windows = Windows(window(spec.key), window(spec.value)) if spec.windowed else None
    return Stack(packed(spec.key), packed(spec.value), windows)


def _abstract(shape: tuple[int, ...], dtype) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def window_pages(spec: CacheSpec) -> int:
    """Pages of exact tokens that a sequence has."""
    return -(-(spec.sink + spec.recent + spec.page) // spec.page)


def stored_bytes(spec: CacheSpec, shape: CacheShape, pages: int, rows: int) -> int:
    """Bytes of ``pages`` pages and the windows of ``rows`` sequences, over all layers."""
    leaves = jax.tree.leaves(abstract_stacks(spec, shape, pages, rows))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def pages_for(tokens: int, spec: CacheSpec) -> int:
    """Pages that one sequence of ``tokens`` tokens needs."""
    if spec.windowed and not spec.exact_layers:
        return spec.packed(tokens) // spec.page
    return -(-tokens // spec.page)


def empty_cache(
    spec: CacheSpec, shape: CacheShape, pages: int, block_table: Int[Array, "B M"]
) -> KVCache:
    """A cache of ``pages`` pages, the padding page among them, that stores nothing yet."""
    rows = block_table.shape[0]
    stacks = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_stacks(spec, shape, pages, rows)
    )
    row = jnp.arange(rows, dtype=jnp.int32)
    return KVCache(stacks, block_table, row, jnp.zeros(rows, jnp.int32), spec)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunk:
    """T new tokens of each sequence; the first ``count`` of a row are real, the rest padding."""

    position: Int[Array, "B T"]  # in the sequence
    count: Int[Array, " B"]

    @property
    def real(self):
        return jnp.arange(self.position.shape[1])[None] < self.count[:, None]


def next_chunk(cache: KVCache, count: Int[Array, " B"], width: int) -> Chunk:
    """The next ``count`` tokens of each sequence, in arrays of ``width`` tokens."""
    offset = jnp.arange(width, dtype=jnp.int32)[None, :]
    return Chunk(cache.length[:, None] + offset, count)


def page_of(cache: KVCache, index: Int[Array, "B T"], real) -> tuple[Array, Array]:
    """(page, slot) of packed tokens by their index; the padding page where they are not real."""
    p = cache.spec.page  # a power of two
    column = jnp.clip(index >> (p.bit_length() - 1), 0, cache.block_table.shape[1] - 1)
    page = jnp.take_along_axis(cache.block_table, column, axis=1)
    return jnp.where(real, page, PADDING_PAGE), index & (p - 1)
