import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.pallas_kernels.chunk_attention import chunk_attention
from tests.pallas_kernels.dense import dense_attention


def _qkv(B, T, N, K, H):
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H)
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_chunk_attention_equals_dense_for_ragged_counts(groups):
    q, k, v = _qkv(4, 9, 2 * groups, 2, 16)
    count = np.array([9, 1, 0, 5])
    out, lse = chunk_attention(q, k, v, jnp.asarray(count), scale=0.3)
    for b, real in enumerate(count):
        visible = np.tril(np.ones((9, 9), bool)) & (np.arange(9) < real)[None]
        expected_out, expected_lse = dense_attention(q[b], k[b], v[b], visible, 0.3)
        np.testing.assert_allclose(out[b], expected_out, atol=2e-6)
        np.testing.assert_allclose(lse[b], expected_lse, atol=2e-6)


def test_chunk_attention_equals_jax_dot_product_attention():
    q, k, v = _qkv(2, 33, 6, 3, 64)
    out, _ = chunk_attention(q, k, v, jnp.array([33, 33]), scale=64**-0.5)
    with jax.default_matmul_precision("highest"):  # no TF32 on GPUs
        expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=2e-6)
