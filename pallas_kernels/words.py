"""Floats stored as the integer words of the same bits.

Pages hold words, not floats: XLA on CPU widens whole bfloat16 buffers to float32 around a scatter,
which would copy the cache at every step; integers it leaves alone. The conversion itself is free.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

_FLOATS = {jnp.dtype(jnp.uint16): jnp.bfloat16, jnp.dtype(jnp.uint32): jnp.float32}


def to_words(x: Float[Array, "*shape"], words) -> UInt[Array, "*shape"]:
    """``x`` rounded to bfloat16 for words of uint16, to float32 for uint32."""
    x = x.astype(jnp.float32)
    if jnp.dtype(words) == jnp.uint16:
        x = as_bfloat16(x).astype(jnp.bfloat16)
    return jax.lax.bitcast_convert_type(x, words)


def from_words(words: UInt[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The floats, as float32."""
    floats = jax.lax.bitcast_convert_type(words, _FLOATS[words.dtype])
    return floats.astype(jnp.float32)


def as_bfloat16(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """float32 rounded to bfloat16, to the nearest and at a tie to the even one.

    In integers, which work in kernels too. A pair of casts would not do: XLA leaves such out.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & jnp.uint32(0xFFFF0000)
    return jnp.where(jnp.isnan(x), x, jax.lax.bitcast_convert_type(rounded, jnp.float32))
