"""The sum of hidden states and its norm in one launch, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.pallas_kernels.triton.add_norm import add_norm
from jkvq.pallas_kernels.types import Unsummed


@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("width", "of_one"), [(64, False), (576, False), (576, True)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("parts", "biased"), [(1, False), (1, True), (4, True)])
def test_a_sum_and_its_norm(parts, biased, width, of_one, dtype, interpret):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(5, 1, width)) * 4, dtype)
    more = jnp.asarray(rng.normal(size=(parts, *x.shape)) * 4, dtype if parts == 1 else jnp.float32)
    weight = jnp.asarray(rng.uniform(0.5, 2, width), dtype)
    bias = jnp.asarray(rng.normal(size=width) * biased, dtype)
    added = Unsummed(more, bias if biased else None, jnp.dtype(dtype))
    total, normed = add_norm(x, added, weight, 1e-5, of_one=of_one, interpret=interpret)
    assert total.dtype == normed.dtype == dtype
    exact = np.asarray(x, np.float64) + np.asarray(more, np.float64).sum(0)
    exact = exact + np.asarray(bias, np.float64)
    unit = 2.0 ** -(23 if dtype == jnp.float32 else 8)
    np.testing.assert_allclose(np.asarray(total, np.float64), exact, rtol=unit, atol=16 * 2.0**-23)
    wide = np.asarray(total, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    expected = expected * (np.asarray(weight, np.float64) + of_one)
    np.testing.assert_allclose(
        np.asarray(normed, np.float64), expected, rtol=1e-6 if dtype == jnp.float32 else 2**-7
    )


@pytest.mark.parametrize("of_one", [False, True])
def test_it_has_a_derivative(of_one):
    rng = np.random.default_rng(0)
    sizes = (3, 24), (2, 3, 24), 24, 24
    at = [*(rng.normal(size=size) for size in sizes[:3]), rng.uniform(0.5, 2, sizes[3])]
    along = [rng.normal(size=x.shape) for x in at]

    def plain(x, parts, bias, weight):
        total = x + parts.sum(0) + bias
        root = np.sqrt((total**2).mean(-1, keepdims=True) + 1e-5)
        return total, total / root * (weight + of_one)

    step = 1e-6
    ends = [
        plain(*(x + sign * step * d for x, d in zip(at, along, strict=True))) for sign in (1, -1)
    ]
    expected = [(after - before) / (2 * step) for after, before in zip(*ends, strict=True)]
    start, change = (tuple(jnp.asarray(x, jnp.float32) for x in of) for of in (at, along))

    def by_kernel(x, parts, bias, weight):
        more = Unsummed(parts, bias, x.dtype)
        return add_norm(x, more, weight, 1e-5, of_one=of_one, interpret=True)

    _, found = jax.jvp(by_kernel, start, change)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
