import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.cache.specs.spec import SideSpec
from jkvq.calibration.learning import straight_through
from jkvq.calibration.learning.straight_through import nearest_levels, read_back
from jkvq.pallas_kernels.formats.codecs import AffineCodec, DigitCodec

AFFINE = {"rotation": "balanced", "center": True, "step": "fitted"}
SIDES = [
    SideSpec(2, "affine", **AFFINE),
    SideSpec(3, "affine", **AFFINE),
    SideSpec(4, "affine", group=32, **AFFINE),
    SideSpec(2, "affine", digits=(2, 1, 1, 0), **AFFINE),
]


@pytest.mark.parametrize("side", SIDES, ids=str)
def test_it_reads_what_the_cache_reads_and_loses_more_of_larger_values(side, monkeypatch):
    """Along themselves, the derivative of what values give back is that again."""
    x = jax.random.normal(jax.random.key(1), (2, 5, 3, 64))
    if side.digits:
        codec = DigitCodec(side.bits, side.digits)
    else:
        codec = AffineCodec(side.bits, side.group, side.step)

    @jax.jit
    def read(x):
        return codec.decode(codec.encode(x), jnp.ones((2, 5), bool)), read_back(side, x)

    expected, found = read(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(straight_through, "as_bfloat16", lambda x: x)
    found, along = jax.jit(lambda x: jax.jvp(lambda x: read_back(side, x), (x,), (x,)))(x)
    np.testing.assert_allclose(found, expected, atol=0.1)
    np.testing.assert_allclose(along, found, rtol=1e-4, atol=1e-4)


def test_codes_pass_gradients_unless_they_are_clipped():
    x = jnp.array([[-3.0, 0.2, 1.4, 2.6, 9.0]])
    one, zero = jnp.ones(1), jnp.zeros(1)
    codes, back = jax.vjp(lambda x: nearest_levels(x, one, zero, 2), x)
    assert codes.tolist() == [[0, 0, 1, 3, 3]]
    assert back(jnp.ones_like(x))[0].tolist() == [[0, 1, 1, 1, 0]]
