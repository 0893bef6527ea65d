"""The arithmetic of one warp over Lloyd's codes, in numpy, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.pallas_kernels.formats.lloyd import group_levels
from jkvq.pallas_kernels.formats.packing import pack
from jkvq.pallas_kernels.mosaic.sides.lloyd_keys import LloydKeys
from jkvq.pallas_kernels.mosaic.sides.lloyd_values import LloydValues
from jkvq.pallas_kernels.mosaic.tile import Tile
from tests.pallas_kernels.mosaic.emulated import Emulated, outputs_of, seen_in

LANE = np.arange(32, dtype=np.uint32)
CODES, UNITS = 64, 96 * 1024  # where a tile lies in shared memory
CASES = [(bits, H, tokens) for bits in (2, 3, 4) for H, tokens in ((64, 16), (128, 64), (256, 32))]


def _tile(rng, bits: int, channels: int, tokens: int, real=None):
    """A tile's numbers, its instructions and itself; units are NaN where no token is real."""
    codes = rng.integers(0, 2**bits, (tokens, channels))
    units = rng.uniform(0.5, 1.5, tokens).astype(np.float16)
    packed = np.asarray(pack(jnp.asarray(codes, jnp.int32), bits)).view(np.uint8).reshape(-1)
    stored = units if real is None else np.where(real, units, np.float16(np.nan))
    shared = np.full(128 * 1024, 0xFF, np.uint8)
    shared[CODES : CODES + packed.size] = packed
    shared[UNITS : UNITS + 2 * tokens] = stored.astype(np.float16).view(np.uint8)
    o = Emulated(shared)
    numbers = group_levels(bits, channels)[codes] * units[:, None].astype(np.float64)
    return numbers, o, Tile(o, LANE, tokens, channels * bits // 8)


@pytest.mark.parametrize(("bits", "channels", "tokens"), CASES)
def test_scores_are_products_of_query_and_keys(bits, channels, tokens):
    rng = np.random.default_rng(bits)
    numbers, o, tile = _tile(rng, bits, channels, tokens)
    keys = LloydKeys(tile, bits, channels)
    q = rng.normal(size=(4, channels)).astype(np.float32)
    query = keys.query(lambda channel: q[LANE // 8, channel.astype(np.int64)], 0.25)
    found = keys.scores([o.i(CODES), o.i(UNITS)], query, o.f(-1.5))
    expected = 0.25 * q.astype(np.float64) @ numbers.T - 1.5
    for x, scores in enumerate(found):
        token = tile.token(x).astype(np.int64)
        np.testing.assert_allclose(scores, expected[LANE % 4, token], atol=2e-3)


@pytest.mark.parametrize(("first", "past"), [(None, None), (None, 11), (5, 11)])
@pytest.mark.parametrize(("bits", "channels", "tokens"), CASES)
def test_outputs_are_sums_of_values_by_weights(bits, channels, tokens, first, past):
    rng = np.random.default_rng(bits)
    token = np.arange(tokens)
    real = (token >= (first or 0)) & (token < (past or tokens))
    numbers, o, tile = _tile(rng, bits, channels, tokens, real)
    values = LloydValues(tile, bits, channels)
    p = np.where(real, rng.uniform(size=(4, tokens)) ** 8, 0).astype(np.float32)
    weights = [p[LANE % 4, tile.token(x).astype(np.int64)] for x in range(tile.each)]
    state = values.zero
    for _ in range(2):
        given = seen_in(o, first, past)
        state = values.add([o.i(CODES), o.i(UNITS)], weights, given, state)
    found = outputs_of(values, state, o.f(0.5), channels)
    expected = p[:, real].astype(np.float64) @ numbers[real]
    assert np.linalg.norm(found - expected) < 3e-4 * np.linalg.norm(expected)
