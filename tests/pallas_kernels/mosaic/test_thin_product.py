"""Products of a few rows by large matrices, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.pallas_kernels.mosaic.thin_product import (
    Cut,
    cut_of,
    gated_thin_product,
    serves,
    serves_gated,
    thin_product,
)

MATRICES = [(4096, 4096), (6144, 4096), (24576, 4096), (4096, 12288), (2560, 9728)]


@pytest.mark.parametrize(("outputs", "inputs"), MATRICES)
def test_a_cut_covers_a_matrix(outputs, inputs):
    cut = cut_of(outputs, inputs)
    assert cut is not None
    assert outputs * cut.parts == 128 * cut.rows
    assert inputs % (cut.parts * cut.step) == 0
    assert cut.stages * 2 * cut.step * (64 + cut.rows) <= 200 * 1024


def test_what_it_does_not_serve():
    few, many = jnp.zeros((8, 4096), jnp.bfloat16), jnp.zeros((65, 4096), jnp.bfloat16)
    weight = jnp.zeros((4096, 4096), jnp.bfloat16)
    assert cut_of(4096, 4096) == Cut(128, 4, 128, 4)
    assert serves(many[:64], weight)
    assert not serves(few, weight) and not serves(many, weight) and not serves(many[:20], weight)
    assert not serves(many[:64].astype(jnp.float32), weight.astype(jnp.float32))
    assert cut_of(576, 576) is None


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(("outputs", "inputs"), MATRICES)
def test_it_lowers_for_cuda(outputs, inputs, rows):
    shapes = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((rows, inputs), (outputs, inputs))]
    text = jax.jit(thin_product).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "thin_product_block" in text  # by which a profile tells it from attention


def test_a_gated_one_lowers_for_cuda():
    shapes = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((32, 4096), (24576, 4096))]
    assert serves_gated(*shapes)
    call = jax.jit(lambda x, weight: gated_thin_product(x, weight, jax.nn.silu))
    text = call.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


def _random(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(("outputs", "inputs"), MATRICES)
def test_a_product(outputs, inputs, rows):
    x, weight = _random((rows, inputs), (outputs, inputs))
    found = np.asarray(jax.jit(thin_product)(x[:, None], weight), np.float64)
    assert found.shape[1:] == (rows, 1, outputs)
    wide = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(found.sum(0)[:, 0], wide, atol=2**-8 * 4 * inputs**0.5)


@pytest.mark.gpu
def test_a_gated_product():
    x, weight = _random((32, 4096), (24576, 4096))
    weight = weight * jnp.bfloat16(2**-6)
    found = jax.jit(lambda x, weight: gated_thin_product(x, weight, jax.nn.silu))(x, weight)
    gate, up = np.split(np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T, 2, axis=1)
    expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-7, atol=2**-9)
