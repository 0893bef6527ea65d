"""The paged KV cache: a pytree that every step takes, updates in place and returns."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt

from jkvq.pages import PADDING_PAGE
from jkvq.spec import CacheSpec, SideSpec

_WORDS = {16: jnp.uint16, 32: jnp.uint32}  # see pallas_kernels/words.py


class CacheShape(NamedTuple):
    """What a model asks of its cache, whatever the spec."""

    layers: int  # L
    kv_heads: int  # K
    head_dim: int  # H

    @property
    def elements_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of a batch of sequences, in pages of a shared pool.

    Token t of sequence b lies in page ``block_table[b, t // p]``, slot ``t % p``. Layers are
    stacked on the leading axis, so that one buffer holds them all and is updated in place.
    """

    keys: UInt[Array, "L P K p H"]
    values: UInt[Array, "L P K p H"]
    block_table: Int[Array, "B M"]
    length: Int[Array, " B"]  # tokens stored
    spec: CacheSpec = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Placement:
    """Where the T new tokens of each sequence go; padding goes to the padding page."""

    position: Int[Array, "B T"]  # in the sequence
    page: Int[Array, "B T"]
    slot: Int[Array, "B T"]
    count: Int[Array, " B"]  # tokens that are not padding, at the front


def abstract_pages(spec: CacheSpec, shape: CacheShape, pages: int):
    """Shapes and dtypes of the stored arrays (keys, values): what ``empty_cache`` allocates."""

    def side(side: SideSpec):
        return jax.ShapeDtypeStruct(
            (shape.layers, pages, shape.kv_heads, spec.page, shape.head_dim), _WORDS[side.bits]
        )

    return side(spec.key), side(spec.value)


def page_bytes(spec: CacheSpec, shape: CacheShape) -> int:
    """Bytes of one page over all layers, keys and values."""
    return sum(side.size * side.dtype.itemsize for side in abstract_pages(spec, shape, 1))


def pages_for(tokens: int, spec: CacheSpec) -> int:
    """Pages that hold ``tokens`` tokens of one sequence."""
    return -(-tokens // spec.page)


def empty_cache(
    spec: CacheSpec, shape: CacheShape, pages: int, block_table: Int[Array, "B M"]
) -> KVCache:
    """A cache of ``pages`` pages, the padding page among them, that stores nothing yet."""
    keys, values = (
        jnp.zeros(side.shape, side.dtype) for side in abstract_pages(spec, shape, pages)
    )
    length = jnp.zeros(block_table.shape[:1], jnp.int32)
    return KVCache(keys, values, block_table, length, spec)


def place(cache: KVCache, count: Int[Array, " B"], width: int) -> Placement:
    """Where the next ``count`` tokens of each sequence go, in arrays of ``width`` tokens."""
    offset = jnp.arange(width, dtype=jnp.int32)[None, :]
    position = cache.length[:, None] + offset
    column = jnp.minimum(position // cache.spec.page, cache.block_table.shape[1] - 1)
    page = jnp.take_along_axis(cache.block_table, column, axis=1)
    page = jnp.where(offset < count[:, None], page, PADDING_PAGE)
    return Placement(position, page, position % cache.spec.page, count)
