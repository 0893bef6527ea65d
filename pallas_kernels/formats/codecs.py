"""Codecs: how the keys, or the values, of a layer become packed tokens, and how those are read.

The contract of a codec, which has no state, for one side of one layer; x^ is x as it is read back:

- ``encode(x)`` of x [B, T, K, H] gives packed tokens, each from that token alone: the same token
  gives the same words in any chunk and any batch.
- ``decode`` gives x^; ``dot`` gives scores q . x^, and ``mix`` the sum of x^ by attention weights,
  both straight from packed tokens. Where ``real`` is false a token may hold any bits, even a NaN's;
  what it gives is finite, and is for the caller to leave out.

Every x here is in the basis of the cache: centred and rotated.
"""

from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jkvq.pallas_kernels.formats import affine, lloyd
from jkvq.pallas_kernels.formats.digits import columns, encode_digits, gathered
from jkvq.pallas_kernels.formats.packed import Packed
from jkvq.pallas_kernels.formats.packing import (
    WORD,
    pack,
    pack_stream,
    packed_words,
    unpack,
    unpack_stream,
)
from jkvq.pallas_kernels.formats.words import from_words, to_words


class Codec(Protocol):
    """See the module's docstring."""

    def encode(self, x: Float[Array, "B T K H"]) -> Packed: ...

    def decode(self, tokens: Packed, real: Bool[Array, "B S"]) -> Float[Array, "B S K H"]: ...


@dataclass(frozen=True)
class FloatCodec:
    """Whole floats: bfloat16, float16 or float32."""

    floats: type

    def encode(self, x):
        return Packed(to_words(x, self.floats))

    def decode(self, tokens, real):
        return jnp.where(real[..., None, None], from_words(tokens.codes, self.floats), 0.0)


@dataclass(frozen=True)
class AffineCodec:
    """lo + scale * code for each group, on top of a centroid if there are any.

    Invariants: scale and lo are bfloat16; scale >= 0; a group of equal values x has code 0 and
    lo = x rounded; codes are below 2^bits.
    """

    bits: int
    group: int | None  # None is the whole head
    step: str
    clip: Float[Array, ""] | None = None  # quantile of a head's magnitudes
    centroids: Float[Array, "C K H"] | None = None

    def encode(self, x):
        index = None
        x = x.astype(jnp.float32)
        if self.centroids is not None:
            nearest = _nearest(x, self.centroids)
            x = x - self.centroids[nearest]
            index = nearest.astype(index_dtype(len(self.centroids)))
        if self.clip is not None:
            x = affine.clip_to_quantile(x, self.clip)
        encode = affine.encode_fitted if self.step == "fitted" else affine.encode_min_max
        codes, scale, lo = encode(
            x.reshape(*x.shape[:-1], -1, self.group or x.shape[-1]), self.bits
        )
        codes = codes.reshape(x.shape).astype(jnp.uint8)
        params = to_words(jnp.concatenate([scale, lo], axis=-1), jnp.bfloat16)
        return Packed(pack(codes, self.bits), params, index)

    def decode(self, tokens, real):
        codes, scale, lo = self._read(tokens, real)
        group = codes.shape[-1] // scale.shape[-1]
        x = jnp.repeat(lo, group, -1) + jnp.repeat(scale, group, -1) * codes.astype(jnp.float32)
        return x if self.centroids is None else x + self.centroids[tokens.index]

    def _read(self, tokens: Packed, real):
        assert tokens.params is not None
        params = jnp.where(real[..., None, None], from_words(tokens.params, jnp.bfloat16), 0.0)
        scale, lo = jnp.split(params, 2, axis=-1)
        return unpack(tokens.codes, self.bits), scale, lo


@dataclass(frozen=True)
class DigitCodec:
    """Channels of unequal widths in columns that read as an affine codec's (digits.py).

    Invariants: one scale and lo for a head, in bfloat16; a column's digit is below 2^bits.
    """

    bits: int
    digits: tuple[int, ...]  # of each quarter of the channels

    @property
    def columns(self) -> AffineCodec:
        """What reads the columns."""
        return AffineCodec(self.bits, None, "fitted")

    def encode(self, x):
        found = columns(self.digits, self.bits, x.shape[-1])
        x = x.astype(jnp.float32)[..., found.channel]
        codes, scale, lo = encode_digits(x, self.digits, self.bits)
        codes = codes.astype(jnp.int32) >> (self.bits * found.digit)[None, None, None]
        params = to_words(jnp.stack([scale, lo], axis=-1), jnp.bfloat16)
        return Packed(pack(codes, self.bits), params)

    def decode(self, tokens, real):
        return gathered(self.columns.decode(tokens, real), self.digits, self.bits)


@dataclass(frozen=True)
class LloydCodec:
    """unit * level: a unit for each group, the nearest level for each channel (lloyd.py).

    Invariants: units are float16 and >= 0; a code is below 2^width of its channel; a head takes
    the whole words that its widths add up to, ``bits`` for each channel on average.
    """

    bits: int
    step: str
    allocation: lloyd.Allocation | None = None  # None is the same width everywhere

    def encode(self, x):
        allocation = self.of_heads(*x.shape[-2:])
        fitted = self.step == "fitted"
        codes, units = lloyd.encode(x.astype(jnp.float32), allocation, fitted=fitted)
        if self.allocation is None:
            packed = pack(codes, self.bits)
        else:
            packed = pack_stream(codes, allocation.width, packed_words(x.shape[-1], self.bits))
        stream = self.allocation is not None
        return Packed(packed, to_words(units, jnp.float16), stream=stream)

    def decode(self, tokens, real):
        assert tokens.params is not None
        units = jnp.where(real[..., None, None], from_words(tokens.params, jnp.float16), 0.0)
        K, words = tokens.codes.shape[-2:]
        allocation = self.of_heads(K, words * WORD // self.bits)
        if self.allocation is None:
            codes = unpack(tokens.codes, self.bits)
        else:
            codes = unpack_stream(tokens.codes, allocation.width)
        return lloyd.decode(codes, units, allocation)

    def of_heads(self, heads: int, channels: int) -> lloyd.Allocation:
        """The allocation, written out if it is the same width everywhere."""
        return self.allocation or lloyd.uniform_allocation(heads, channels, self.bits)


def index_dtype(centroids: int) -> type:
    """The narrowest unsigned integers that number so many centroids."""
    return np.uint8 if centroids <= 256 else np.uint16


def _nearest(x: Float[Array, "B T K H"], centroids: Float[Array, "C K H"]):
    """The index of the centroid nearest to each token, over all its heads together."""
    product = jnp.einsum("btkh,ckh->btc", x, centroids, precision="highest")
    return jnp.argmin((centroids**2).sum((1, 2))[None, None] - 2 * product, axis=-1)
