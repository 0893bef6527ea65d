import jax
import numpy as np
import pytest

from jkvq.pallas_kernels.reference.chunk_attention import chunk_attention
from tests.reference import attention as dense_attention

_attend = jax.jit(chunk_attention, static_argnames="scale")


def _qkv(B, T, N, K, H):
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H)
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_chunk_attention_equals_dense_and_ignores_what_nobody_sees(groups):
    q, k, v = _qkv(4, 9, 2 * groups, 2, 16)
    count = np.array([9, 1, 0, 5])
    index = np.arange(9)
    causal = np.asarray(index[:, None] >= index)
    visible = np.asarray([causal & (index < real) for real in count])
    unseen = np.asarray(~visible.any(axis=1)).reshape(4, 9, 1, 1)
    k, v = (np.where(unseen, np.float32(np.nan), x) for x in (k, v))
    out, lse = _attend(q, k, v, visible, scale=0.3)
    for b in range(4):
        expected_out, expected_lse = dense_attention(q[b], k[b], v[b], visible[b], 0.3)
        np.testing.assert_allclose(out[b], expected_out, atol=2e-6)
        np.testing.assert_allclose(lse[b], expected_lse, atol=2e-6)


def test_shifts_are_added_to_the_scores():
    q, k, v = _qkv(2, 9, 4, 2, 16)
    shift = np.random.default_rng(4).standard_normal((2, 9, 4, 9), np.float32) * 5
    seen = np.tril(np.ones((2, 9, 9), bool))
    out, lse = _attend(q, k, v, seen, shift, scale=0.3)
    scores = 0.3 * (np.einsum("btnh,bsnh->btns", q, np.repeat(k, 2, axis=2)) + shift)
    weights = np.where(seen[:, :, None], np.exp(scores), 0.0)
    wanted = np.einsum("btns,bsnh->btnh", weights, np.repeat(v, 2, axis=2))
    np.testing.assert_allclose(out, wanted / weights.sum(-1)[..., None], atol=1e-5)
    np.testing.assert_allclose(lse, np.log(weights.sum(-1)), atol=1e-5)


def test_chunk_attention_equals_jax_dot_product_attention():
    q, k, v = _qkv(2, 33, 6, 3, 64)
    causal = np.tril(np.ones((2, 33, 33), bool))
    out, _ = _attend(q, k, v, causal, scale=64**-0.5)
    with jax.default_matmul_precision("highest"):  # no TF32 on GPUs
        expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=2e-6)
