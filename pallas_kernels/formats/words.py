"""Floats stored as the integer words of the same bits.

Pages hold words, not floats: XLA on CPU widens whole bfloat16 buffers to float32 around a scatter,
which would copy the cache at every step; integers it leaves alone. The conversion itself is free.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

GREATEST = float(jnp.finfo(jnp.float16).max)


def to_words(x: Float[Array, "*shape"], floats) -> UInt[Array, "*shape"]:
    """The words of ``x`` rounded to bfloat16, float16 or float32."""
    x = x.astype(jnp.float32)
    if floats == jnp.bfloat16:
        x = as_bfloat16(x)
    elif floats == jnp.float16:
        x = as_float16(x)
    words = {2: jnp.uint16, 4: jnp.uint32}[jnp.dtype(floats).itemsize]
    return jax.lax.bitcast_convert_type(x.astype(floats), words)


def from_words(words: UInt[Array, "*shape"], floats) -> Float[Array, "*shape"]:
    """The floats, as float32."""
    return jax.lax.bitcast_convert_type(words, floats).astype(jnp.float32)


def as_float16(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """float32 rounded to float16, the greatest one at most."""
    return jax.lax.reduce_precision(jnp.clip(x, -GREATEST, GREATEST), 5, 10)


def as_bfloat16(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """float32 rounded to bfloat16, to the nearest and at a tie to the even one.

    In integers, which work in kernels too. A pair of casts would not do: XLA leaves such out.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & jnp.uint32(0xFFFF0000)
    return jnp.where(jnp.isnan(x), x, jax.lax.bitcast_convert_type(rounded, jnp.float32))
