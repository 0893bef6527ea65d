"""The sum of hidden states and its norm in one launch, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.pallas_kernels.triton.add_norm import add_norm


@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("width", "of_one"), [(64, False), (576, False), (576, True)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_sum_and_its_norm(width, of_one, dtype, interpret):
    rng = np.random.default_rng(0)
    x, more = (jnp.asarray(rng.normal(size=(5, 1, width)) * 4, dtype) for _ in range(2))
    weight = jnp.asarray(rng.uniform(0.5, 2, width), dtype)
    total, normed = add_norm(x, more, weight, 1e-5, of_one=of_one, interpret=interpret)
    assert total.dtype == normed.dtype == dtype
    np.testing.assert_array_equal(total, x + more)
    wide = np.asarray(total, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    expected = expected * (np.asarray(weight, np.float64) + of_one)
    np.testing.assert_allclose(
        np.asarray(normed, np.float64), expected, rtol=1e-6 if dtype == jnp.float32 else 2**-7
    )
