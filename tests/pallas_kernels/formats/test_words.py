import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jkvq.pallas_kernels.formats.words import from_words, to_words

# One length, so that one shape is compiled.
FLOATS = st.lists(st.floats(width=32, allow_nan=False), min_size=16, max_size=16)


@given(FLOATS)
def test_words_round_to_the_nearest_bfloat16(values):
    x = np.asarray(values, np.float32)
    words = to_words(jnp.asarray(x), jnp.bfloat16)
    assert words.dtype == jnp.uint16
    np.testing.assert_array_equal(
        np.asarray(from_words(words, jnp.bfloat16)), x.astype(jnp.bfloat16).astype("f4")
    )


@given(FLOATS)
def test_words_of_32_bits_keep_every_bit(values):
    x = np.asarray(values, np.float32)
    words = np.asarray(to_words(jnp.asarray(x), jnp.float32))
    np.testing.assert_array_equal(words, x.view(np.uint32))
    np.testing.assert_array_equal(np.asarray(from_words(jnp.asarray(words), jnp.float32)), x)


@given(FLOATS)
def test_words_of_float16_are_the_nearest_within_its_range(values):
    x = np.asarray(values, np.float32)
    found = np.asarray(from_words(to_words(jnp.asarray(x), jnp.float16), jnp.float16))
    wanted = np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32)
    # What is below the least normal number may become zero.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2**-14)
    np.testing.assert_array_equal(found[np.abs(x) >= 2**-14], wanted[np.abs(x) >= 2**-14])
