"""What a warp adds to the scores of pages, in numpy, against float64."""

import numpy as np
import pytest

from jkvq.pallas_kernels.mosaic.means import PageMeans
from jkvq.pallas_kernels.mosaic.tile import Tile
from tests.pallas_kernels.mosaic.emulated import Emulated

LANE = np.arange(32, dtype=np.uint32)


@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("channels", [64, 128, 256])
def test_every_tile_gets_the_product_of_queries_and_its_page_s_turns(channels, tiles):
    rng, pages, before = np.random.default_rng(0), 21, 3
    # Larger than float16 is, and of unequal sizes
    queries = (rng.normal(size=(4, channels)) * [[1e5], [1.0], [1e-3], [30.0]]).astype(np.float32)
    turns = rng.normal(size=(before + pages + 2, channels)).astype(np.float16)
    order = rng.permutation(len(turns))  # the row of each page
    o = Emulated(np.zeros(0, np.uint8))

    def row_of(page):
        return order[np.minimum(page.astype(np.int64), len(order) - 1)].astype(np.uint32)

    means = PageMeans(
        *(Tile(o, LANE, 64, 64), tiles, channels),
        lambda channel: queries[LANE // 8, channel.astype(np.int64)],
        *(0.25, turns.view(np.uint32), row_of),
    )
    expected = 0.25 * queries.astype(np.float64) @ turns.astype(np.float64).T
    scores = [o.f(np.nan)] * 2
    first = before * tiles + tiles // 2  # in the middle of a page
    for v in range(first, (before + pages) * tiles):
        found, scores = means.of_tile(o.i(first), o.i(v), scores)
        wanted = expected[:, order[v // tiles]]
        size = 0.25 * np.abs(queries).max(1) * channels**0.5
        assert (np.abs(found - wanted[LANE % 4]) < 1e-5 * size[LANE % 4]).all()
