"""The assembly of the write kernel's quantizer, run by ptx.py, against rounding in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.pallas_kernels.triton import affine_tiles
from tests.pallas_kernels.triton import ptx


@pytest.mark.parametrize(
    ("bits", "digits"), [(2, False), (3, False), (4, False), (8, False), (2, True), (4, True)]
)
def test_nearest_levels_are_the_nearest(bits, digits, monkeypatch):
    monkeypatch.setattr(affine_tiles.plt, "elementwise_inline_asm", ptx.elementwise_inline_asm)
    rng = np.random.default_rng(0)
    scale, lo = (rng.uniform(*ends, 16).astype(np.float32) for ends in ((0.01, 2), (-3, 1)))
    scale[3] = 0  # a token without any spread
    # Channels of one or two digits: lo w and a greatest code of (2^bits - 1) w
    worth = rng.choice([1.0, 2.0**bits + 1], 64).astype(np.float32) if digits else np.ones(64)
    top = (2.0**bits - 1) * worth
    level = rng.uniform(-1, 2**bits, (16, 64)) * worth  # some outside of the range
    x = (scale[:, None] * level + lo[:, None] * worth).astype(np.float32)
    found = affine_tiles.nearest_levels(
        x, jnp.asarray(scale), jnp.asarray(lo), bits, jnp.asarray(worth)[None] if digits else None
    )
    some = scale > 0
    exact = (x[some] - lo[some, None] * worth.astype(np.float64)) / scale[some, None]
    clear = np.abs(exact - np.floor(exact) - 0.5) > 5e-3  # no tie, as float32 sees it
    wanted = np.clip(np.round(exact), 0, top)
    np.testing.assert_array_equal(np.asarray(found)[some][clear], wanted[clear])
    assert np.abs(np.asarray(found)[some] - wanted).max() <= 1 and clear.mean() > 0.98
    assert (np.asarray(found)[~some] == 0).all()
