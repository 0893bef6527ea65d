import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.pallas_kernels.reference.chunk_attention import chunk_attention
from tests.reference import attention as dense_attention


def _qkv(B, T, N, K, H):
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H)
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_chunk_attention_equals_dense_and_ignores_what_nobody_sees(groups):
    q, k, v = _qkv(4, 9, 2 * groups, 2, 16)
    count = np.array([9, 1, 0, 5])
    index = np.arange(9)
    causal = np.asarray(index[:, None] >= index)
    visible = np.asarray([causal & (index < real) for real in count])
    unseen = np.asarray(~visible.any(axis=1)).reshape(4, 9, 1, 1)
    k, v = (jnp.where(unseen, jnp.nan, x) for x in (k, v))
    out, lse = chunk_attention(q, k, v, jnp.asarray(visible), scale=0.3)
    for b in range(4):
        expected_out, expected_lse = dense_attention(q[b], k[b], v[b], visible[b], 0.3)
        np.testing.assert_allclose(out[b], expected_out, atol=2e-6)
        np.testing.assert_allclose(lse[b], expected_lse, atol=2e-6)


def test_shifts_are_added_to_the_scores():
    q, k, v = _qkv(2, 9, 4, 2, 16)
    shift = jax.random.normal(jax.random.key(4), (2, 9, 4, 9)) * 5
    seen = jnp.tril(jnp.ones((2, 9, 9), bool))
    out, lse = chunk_attention(q, k, v, seen, shift, scale=0.3)
    scores = 0.3 * (np.einsum("btnh,bsnh->btns", q, np.repeat(k, 2, axis=2)) + np.asarray(shift))
    weights = np.where(np.asarray(seen)[:, :, None], np.exp(scores), 0.0)
    wanted = np.einsum("btns,bsnh->btnh", weights, np.repeat(v, 2, axis=2))
    np.testing.assert_allclose(out, wanted / weights.sum(-1)[..., None], atol=1e-5)
    np.testing.assert_allclose(lse, np.log(weights.sum(-1)), atol=1e-5)


def test_chunk_attention_equals_jax_dot_product_attention():
    q, k, v = _qkv(2, 33, 6, 3, 64)
    causal = jnp.tril(jnp.ones((2, 33, 33), bool))
    out, _ = chunk_attention(q, k, v, causal, scale=64**-0.5)
    with jax.default_matmul_precision("highest"):  # no TF32 on GPUs
        expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=2e-6)
