"""The arithmetic of one warp over 16-bit floats, in numpy, against float64."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jkvq.pallas_kernels.mosaic.sides.floats import FloatKeys, FloatValues, kind_of
from jkvq.pallas_kernels.mosaic.tile import Tile
from tests.pallas_kernels.mosaic.emulated import Emulated, outputs_of, seen_in

LANE = np.arange(32, dtype=np.uint32)
CODES = 64  # where a tile lies in shared memory
FLOATS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
CASES = [(kind, H, tokens) for kind in FLOATS for H in (64, 128, 256) for tokens in (16, 32)]


def _tile(rng, kind: str, tokens: int, channels: int):
    stored = rng.normal(size=(tokens, channels)).astype(FLOATS[kind])
    shared = np.full(64 * 1024, 0xFF, np.uint8)  # NaN where nothing is stored
    shared[CODES : CODES + stored.nbytes] = stored.view(np.uint8).reshape(-1)
    o = Emulated(shared)
    return stored.astype(np.float64), o, Tile(o, LANE, tokens, 2 * channels)


def test_kinds_are_called_as_instructions_do():
    assert (kind_of(jnp.bfloat16), kind_of(jnp.float16)) == ("bf16", "f16")


@pytest.mark.parametrize(("kind", "channels", "tokens"), CASES)
def test_scores_are_products_of_query_and_keys(kind, channels, tokens):
    rng = np.random.default_rng(channels)
    stored, o, tile = _tile(rng, kind, tokens, channels)
    keys = FloatKeys(tile, kind, channels)
    q = rng.normal(size=(4, channels)).astype(np.float32)
    query = keys.query(lambda channel: q[LANE // 8, channel.astype(np.int64)], 0.25)
    expected = 0.25 * q.astype(np.float64) @ stored.T - 1.5
    for x, scores in enumerate(keys.scores([o.i(CODES)], query, o.f(-1.5))):
        token = tile.token(x).astype(np.int64)
        np.testing.assert_allclose(scores, expected[LANE % 4, token], atol=3e-4)


@pytest.mark.parametrize(("first", "past"), [(None, None), (None, 11), (5, 11)])
@pytest.mark.parametrize(("kind", "channels", "tokens"), CASES)
def test_outputs_are_sums_of_values_by_weights(kind, channels, tokens, first, past):
    rng = np.random.default_rng(channels)
    stored, o, tile = _tile(rng, kind, tokens, channels)
    token = np.arange(tokens)
    real = (token >= (first or 0)) & (token < (past or tokens))
    row = 2 * channels
    for other in np.flatnonzero(~real):
        o.shared[CODES + row * other : CODES + row * (other + 1)] = 0xFF
    values = FloatValues(tile, kind, channels)
    p = np.where(real, rng.uniform(size=(4, tokens)) ** 4, 0).astype(np.float32)
    weights = [p[LANE % 4, tile.token(x).astype(np.int64)] for x in range(tile.each)]
    state = values.zero
    for _ in range(2):
        state = values.add([o.i(CODES)], weights, seen_in(o, first, past), state)
    found = outputs_of(values, state, o.f(0.5), channels)
    expected = p[:, real].astype(np.float64) @ stored[real]
    assert np.linalg.norm(found - expected) < 2e-5 * np.linalg.norm(expected)
