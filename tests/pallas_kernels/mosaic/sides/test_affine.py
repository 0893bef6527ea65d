"""The arithmetic of one warp, in numpy, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.pallas_kernels.formats.digits import gathered
from jkvq.pallas_kernels.formats.packing import pack
from jkvq.pallas_kernels.mosaic.sides.affine_keys import AffineKeys
from jkvq.pallas_kernels.mosaic.sides.affine_values import AffineValues
from jkvq.pallas_kernels.mosaic.tile import Tile
from tests.pallas_kernels.mosaic.emulated import Emulated, outputs_of, seen_in

LANE = np.arange(32, dtype=np.uint32)
CODES, PARAMS = 64, 96 * 1024  # where a tile lies in shared memory
ROWS = [(bits, H) for bits in (8, 4, 3, 2) for H in (64, 128, 256) if (bits, H) != (3, 64)]


def _side(rng, tokens: int, channels: int, bits: int):
    """A tile's codes, scales and los, and its bytes as they lie in a page."""
    codes = rng.integers(0, 2**bits, (tokens, channels))
    scale = rng.uniform(0.5, 1.5, tokens) * 4 / 2**bits
    lo = -scale * (2**bits - 1) / 2 + 0.2 * rng.normal(size=tokens)
    words = [x.astype(np.float32).view(np.uint32) >> 16 for x in (scale, lo)]
    scale, lo = ((word << 16).view(np.float32).astype(np.float64) for word in words)
    packed = np.asarray(pack(jnp.asarray(codes, jnp.int32), bits))
    return codes, scale, lo, packed.view(np.uint8), np.stack(words).astype(np.uint16).view(np.uint8)


def _lanes(codes, params) -> Emulated:
    shared = np.full(128 * 1024, 0xFF, np.uint8)  # NaN where nothing is stored
    shared[CODES : CODES + codes.size] = codes.reshape(-1)
    shared[PARAMS : PARAMS + params.size] = params.reshape(-1)
    return Emulated(shared)


@pytest.mark.parametrize("tokens", [16, 32, 64])
@pytest.mark.parametrize(("bits", "channels"), ROWS)
def test_scores_are_products_of_query_and_keys(bits, channels, tokens):
    rng = np.random.default_rng(bits)
    codes, scale, lo, *stored = _side(rng, tokens, channels, bits)
    o = _lanes(*stored)
    tile = Tile(o, LANE, tokens, channels * bits // 8)
    keys = AffineKeys(tile, bits, channels, None)
    q = rng.normal(size=(4, channels)).astype(np.float32)
    query = keys.query(lambda channel: q[LANE // 8, channel.astype(np.int64)], 0.25)
    found = keys.scores([o.i(CODES), o.i(PARAMS)], query, o.f(-1.5))
    expected = 0.25 * q.astype(np.float64) @ (codes * scale[:, None] + lo[:, None]).T - 1.5
    for x, scores in enumerate(found):
        token = tile.token(x).astype(np.int64)
        np.testing.assert_allclose(scores, expected[LANE % 4, token], atol=2e-3)


@pytest.mark.parametrize("digits", [(2, 1, 1, 0), (3, 1, 0, 0)])
def test_scores_of_digits(digits):
    rng, bits, channels, tokens = np.random.default_rng(0), 2, 128, 64
    codes, scale, lo, *stored = _side(rng, tokens, channels, bits)
    o = _lanes(*stored)
    tile = Tile(o, LANE, tokens, 32)
    keys = AffineKeys(tile, bits, channels, digits)
    q = rng.normal(size=(4, channels)).astype(np.float32)
    query = keys.query(lambda channel: q[LANE // 8, channel.astype(np.int64)], 1.0)
    found = keys.scores([o.i(CODES), o.i(PARAMS)], query, o.f(0.0))
    columns = jnp.asarray(codes * scale[:, None] + lo[:, None], jnp.float32)
    expected = q.astype(np.float64) @ np.asarray(gathered(columns, digits, bits), np.float64).T
    for x, scores in enumerate(found):
        token = tile.token(x).astype(np.int64)
        error = np.abs(scores - expected[LANE % 4, token]).max()
        assert error < 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize(("first", "past"), [(None, None), (None, 11), (5, 11)])
@pytest.mark.parametrize("tokens", [16, 32, 64])
@pytest.mark.parametrize(("bits", "channels"), ROWS)
def test_outputs_are_sums_of_values_by_weights(bits, channels, tokens, first, past):
    rng = np.random.default_rng(bits)
    codes, scale, lo, *stored = _side(rng, tokens, channels, bits)
    token = np.arange(tokens)
    real = (token >= (first or 0)) & (token < (past or tokens))
    stored[1].view(np.uint16).reshape(2, tokens)[:, ~real] = 0x7FFF
    o = _lanes(*stored)
    tile = Tile(o, LANE, tokens, channels * bits // 8)
    values = AffineValues(tile, bits, channels)
    p = np.where(real, rng.uniform(size=(4, tokens)) ** 8, 0).astype(np.float32)
    token = [tile.token(x).astype(np.int64) for x in range(tile.each)]
    weights = [p[LANE % 4, each] for each in token]
    state = values.zero
    for _ in range(2):
        given = seen_in(o, first, past)
        state = values.add([o.i(CODES), o.i(PARAMS)], weights, given, state)
    found = outputs_of(values, state, o.f(0.5), channels)
    expected = p[:, real].astype(np.float64) @ (codes * scale[:, None] + lo[:, None])[real]
    assert np.linalg.norm(found - expected) < 2e-4 * np.linalg.norm(expected)
