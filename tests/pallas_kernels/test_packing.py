import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jkvq.pallas_kernels.packing import (
    pack,
    pack_stream,
    packed_bytes,
    plane_widths,
    unpack,
    unpack_stream,
)
from tests.reference import pack_bits, pack_planes


@pytest.mark.parametrize("bits", range(1, 9))
def test_pack_equals_the_definition_and_comes_back(bits):
    @given(hnp.arrays(np.uint8, (3, 40), elements=st.integers(0, 2**bits - 1)))
    def check(codes):
        packed = np.asarray(pack(jnp.asarray(codes), bits))
        np.testing.assert_array_equal(packed, [pack_planes(row, bits) for row in codes])
        np.testing.assert_array_equal(unpack(jnp.asarray(packed), bits), codes)

    check()


@pytest.mark.parametrize("bits", range(1, 9))
def test_unpack_takes_every_byte(bits):
    count = sum(256 // np.gcd(256, width) for width in plane_widths(bits)) * 256
    packed = np.random.default_rng(bits).permutation(np.arange(count) % 256).astype(np.uint8)
    packed = packed[: len(packed) // bits * bits].reshape(-1, 8 * bits // 8 * 8)
    codes = unpack(jnp.asarray(packed), bits)
    np.testing.assert_array_equal(pack(codes, bits), packed)
    assert int(codes.max()) == 2**bits - 1


@given(
    st.lists(st.integers(1, 8), min_size=16, max_size=16),
    hnp.arrays(np.uint8, (1, 2, 1, 16)),
)
def test_pack_stream_equals_the_definition_and_comes_back(widths, codes):
    widths = np.sort(widths)[::-1].copy()
    widths[-1] = max(1, widths[-1])
    codes = codes % (2 ** widths.astype(np.int64)).reshape(1, 1, 1, -1)
    size = -(-int(widths.sum()) // 8)
    packed = pack_stream(jnp.asarray(codes, jnp.uint8), jnp.asarray(widths[None]), size)
    for t in range(2):
        np.testing.assert_array_equal(packed[0, t, 0], pack_bits(codes[0, t, 0], widths))
    np.testing.assert_array_equal(unpack_stream(packed, jnp.asarray(widths[None])), codes)


def test_packed_bytes_refuses_what_fills_no_whole_bytes():
    assert packed_bytes(80, 3) == 30
    with pytest.raises(ValueError, match="20 codes of 3 bits"):
        packed_bytes(20, 3)
