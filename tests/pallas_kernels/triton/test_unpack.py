"""The assembly that takes codes out of their words, run by ptx.py, against the codes themselves."""

import numpy as np
import pytest

from jkvq.pallas_kernels.formats.lloyd import TERMS, group_levels, level_coefficients
from jkvq.pallas_kernels.triton import unpack
from jkvq.pallas_kernels.triton.unpack import Piece, code_tile, level_tile, pieces, stream_tile
from tests.pallas_kernels.triton import ptx
from tests.reference import pack_bits, pack_planes

TOKENS = 8


@pytest.fixture(autouse=True)
def assembly(monkeypatch):
    monkeypatch.setattr(unpack.plt, "elementwise_inline_asm", ptx.elementwise_inline_asm)


def _packed(bits: int, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Random codes [p, channels], all of them there, and their words."""
    codes = np.random.default_rng(0).integers(0, 2**bits, (TOKENS, channels))
    codes.reshape(-1)[: 2**bits] = np.arange(2**bits)
    return codes, np.stack([pack_planes(row, bits) for row in codes])


def _words(words: np.ndarray, piece: Piece) -> np.ndarray:
    """The tile that a kernel loads for a piece."""
    return words[:, piece.word + np.arange(piece.width) % piece.words]


@pytest.mark.parametrize(
    ("bits", "channels", "group"),
    [(2, 128, 128), (3, 64, 64), (3, 128, 32), (4, 64, 64), (4, 256, 64), (6, 64, 16), (8, 64, 64)],
)
def test_code_tiles_hold_the_codes(bits, channels, group):
    codes, words = _packed(bits, channels)
    found = np.zeros(codes.shape)
    for part in pieces(bits, channels, group):
        for piece in part:
            tile = code_tile(_words(words, piece), piece, interpret=False)
            of_part = np.asarray(tile, np.float64) / np.asarray(unpack.weight(piece), np.float64)
            found[:, piece.start : piece.start + piece.width] += of_part * piece.worth
    np.testing.assert_array_equal(found, codes)


@pytest.mark.parametrize(("bits", "channels"), [(2, 64), (3, 64), (3, 128), (4, 128)])
def test_level_tiles_hold_the_levels_of_the_codes(bits, channels):
    codes, words = _packed(bits, channels)
    levels = group_levels(bits, channels)
    for parts in zip(*pieces(bits, channels, channels), strict=True):
        tiles = [_words(words, part) for part in parts]
        found = level_tile(tiles, list(parts), channels, interpret=False)
        wanted = levels[codes[:, parts[0].start : parts[0].start + parts[0].width]]
        # A few roundings to float16 (2^-11) of terms that are larger than their sum
        np.testing.assert_allclose(found, wanted, rtol=2**-9)


def test_stream_tiles_hold_units_times_levels():
    width = np.repeat([8, 7, 6, 5, 4, 3, 2, 1], 4)
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 2**width, (TOKENS, len(width)))
    codes[0], codes[1] = 0, 2**width - 1
    words = np.stack([pack_bits(row, width) for row in codes]).T  # [words, p]
    unit = rng.uniform(0.1, 8, (len(width), TOKENS)).astype(np.float16)
    offset = np.cumsum(width) - width
    word, bit = offset // 16, offset % 16
    assert (bit + width > 16).any()  # a code that goes on in the next word
    coefficients = np.zeros((len(width), TERMS), np.float16)
    for row, bits in zip(coefficients, width, strict=True):
        own = level_coefficients(int(bits), 64)
        row[: len(own)] = own
    low, high = words[word], words[np.minimum(word + 1, len(words) - 1)]
    first, bits = (x[:, None].astype(np.int32) for x in (bit, width))
    levels = list(coefficients.T[..., None])
    found = stream_tile(low, high, first, bits, levels, unit, interpret=False)
    table = {bits: group_levels(bits, 64) for bits in range(1, 9)}
    wanted = np.array([table[bits][row] for bits, row in zip(width, codes.T, strict=True)])
    np.testing.assert_allclose(found, unit.astype(np.float64) * wanted, rtol=2**-8)
