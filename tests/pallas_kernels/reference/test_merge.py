import jax
import jax.numpy as jnp
import numpy as np

from jkvq.pallas_kernels.reference.merge import merge
from tests.reference import attention as dense_attention


def test_merge_of_two_segments_equals_attention_over_both():
    q, k, v = (jax.random.normal(jax.random.key(i), (9, 2, 16)) for i in range(3))
    sees_all = np.ones((9, 9), bool)
    first = dense_attention(q, k[:4], v[:4], sees_all[:, :4], 0.25)
    second = dense_attention(q, k[4:], v[4:], sees_all[:, 4:], 0.25)
    parts = (jnp.asarray(part, jnp.float32) for part in (*first, *second))
    out, lse = merge(*parts)
    expected_out, expected_lse = dense_attention(q, k, v, sees_all, 0.25)
    np.testing.assert_allclose(out, expected_out, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-6)


def test_merge_with_empty_segments_keeps_the_other():
    out_a, out_b = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[5.0], [6.0], [7.0]])
    empty = -jnp.inf
    out, lse = merge(out_a, jnp.array([0.5, empty, empty]), out_b, jnp.array([empty, 0.5, empty]))
    np.testing.assert_array_equal(out, [[1.0], [6.0], [0.0]])
    np.testing.assert_array_equal(lse, [0.5, 0.5, -np.inf])


def test_merge_of_large_scores_does_not_overflow():
    out, lse = merge(
        jnp.ones((1, 1)), jnp.array([300.0]), jnp.full((1, 1), 3.0), jnp.array([300.0])
    )
    np.testing.assert_allclose(out, [[2.0]])
    np.testing.assert_allclose(lse, [300.0 + np.log(2)])
