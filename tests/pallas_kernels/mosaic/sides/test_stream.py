"""The arithmetic of one warp over codes of unequal widths, in numpy, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.pallas_kernels.formats.lloyd import decode, make_allocation
from jkvq.pallas_kernels.formats.packing import pack_stream
from jkvq.pallas_kernels.mosaic.sides.stream_keys import StreamKeys, channel_table
from jkvq.pallas_kernels.mosaic.tile import Tile
from tests.pallas_kernels.mosaic.emulated import Emulated

LANE = np.arange(32, dtype=np.uint32)
TOKENS, CODES, UNITS = 64, 64, 48 * 1024  # of a tile, and where it lies in shared memory


@pytest.mark.parametrize("row", [48, 128])  # of the tile's wider side: the order of its tokens
@pytest.mark.parametrize("channels", [64, 128])
def test_scores_are_products_of_query_and_keys(channels, row):
    rng, groups = np.random.default_rng(0), 4
    width = np.repeat([6, 4, 3, 1], channels // 4)[None]
    group = np.repeat(np.arange(groups), channels // 4)[None]
    allocation = make_allocation(width, group, groups=groups)
    codes = rng.integers(0, 2 ** width[0], (1, TOKENS, 1, channels)).astype(np.uint8)
    units = rng.uniform(0.5, 1.5, (1, TOKENS, 1, groups)).astype(np.float16)
    words = int(width.sum()) // 16 + 1
    packed = np.asarray(pack_stream(jnp.asarray(codes), allocation.width, words))[0, :, 0]
    numbers = np.asarray(decode(jnp.asarray(codes), jnp.asarray(units, jnp.float32), allocation))
    shared = np.full(64 * 1024, 0xFF, np.uint8)
    for start, array in ((CODES, packed), (UNITS, units[0, :, 0])):
        stored = np.ascontiguousarray(array.T).view(np.uint8).reshape(-1)  # tokens last
        shared[start : start + stored.size] = stored
    o = Emulated(shared)
    tile = Tile(o, LANE, TOKENS, row)
    keys = StreamKeys(tile, channels, np.asarray(channel_table(allocation)))
    q = rng.normal(size=(4, channels)).astype(np.float32)
    query = keys.query(lambda channel: q[LANE // 8, channel.astype(np.int64)], 0.25)
    found = keys.scores([o.i(CODES), o.i(UNITS)], query, o.f(-1.5))
    expected = 0.25 * q.astype(np.float64) @ numbers[0, :, 0].astype(np.float64).T - 1.5
    for x, scores in enumerate(found):
        token = tile.token(x).astype(np.int64)
        error = np.abs(scores - expected[LANE % 4, token])
        assert error.max() < 2e-3 * np.abs(expected + 1.5).max()
