import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jkvq.pallas_kernels.formats.packing import (
    pack,
    pack_stream,
    packed_words,
    unpack,
    unpack_stream,
)
from tests.reference import pack_bits, pack_planes

_pack, _unpack = (jax.jit(function, static_argnums=1) for function in (pack, unpack))


@pytest.mark.parametrize("bits", range(1, 9))
def test_pack_equals_the_definition_and_comes_back(bits):
    @given(hnp.arrays(np.uint8, (3, 48), elements=st.integers(0, 2**bits - 1)))
    def check(codes):
        packed = _pack(codes, bits)
        np.testing.assert_array_equal(packed, [pack_planes(row, bits) for row in codes])
        np.testing.assert_array_equal(_unpack(packed, bits), codes)

    check()


@pytest.mark.parametrize("bits", range(1, 9))
def test_unpack_takes_every_word(bits):
    words = np.random.default_rng(bits).permutation(2**16).astype(np.uint16)
    words = words[: len(words) // bits * bits].reshape(-1, bits)
    codes = _unpack(words, bits)
    np.testing.assert_array_equal(_pack(codes, bits), words)
    assert int(codes.max()) == 2**bits - 1


@jax.jit
def _there_and_back(codes, widths):
    """In words for channels of 8 bits, whatever their widths: one program."""
    packed = pack_stream(codes, widths, 8)
    return packed, unpack_stream(packed, widths)


@given(
    st.lists(st.integers(1, 8), min_size=16, max_size=16),
    hnp.arrays(np.uint8, (1, 2, 1, 16)),
)
def test_pack_stream_equals_the_definition_and_comes_back(widths, codes):
    widths = np.array(widths)
    codes = codes % (2 ** widths.astype(np.int64)).reshape(1, 1, 1, -1)
    packed, back = _there_and_back(codes.astype(np.uint8), widths[None])
    for t in range(2):
        words = pack_bits(codes[0, t, 0], widths)
        np.testing.assert_array_equal(packed[0, t, 0, : len(words)], words)
    np.testing.assert_array_equal(back, codes)


def test_packed_words_refuses_what_fills_no_whole_words():
    assert packed_words(80, 3) == 15
    with pytest.raises(ValueError, match="20 codes of 3 bits"):
        packed_words(20, 3)
