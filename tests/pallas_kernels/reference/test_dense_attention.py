import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.pallas_kernels.reference.dense_attention import products, softmax, weighted_sum
from tests import reference


@pytest.mark.parametrize("groups", [1, 3])
def test_the_three_steps_together_equal_attention_in_float64(groups):
    rng = np.random.default_rng(groups)
    T, S, K, H = 7, 11, 2, 16
    q, k, v = (rng.normal(size=shape) for shape in ((T, K * groups, H), (S, K, H), (S, K, H)))
    visible = rng.random((T, S)) < 0.6
    visible[2], visible[3] = False, True  # one sees nothing, one everything
    q[3] *= 1000  # whose scores would overflow
    logits = 0.3 * products(*(jnp.asarray(x, jnp.float32) for x in (q, k)))
    weights, lse = softmax(logits, jnp.asarray(visible))
    out = weighted_sum(weights, jnp.asarray(v, jnp.float32))
    wanted_out, wanted_lse = reference.attention(q, k, v, visible, 0.3)
    np.testing.assert_allclose(out, wanted_out, atol=2e-6)
    np.testing.assert_allclose(np.asarray(lse).reshape(-1, T).T, wanted_lse, rtol=1e-6, atol=2e-6)
    assert (np.asarray(weights)[:, :, ~visible] == 0).all()
    seen = np.asarray(weights)[:, :, visible.any(1)].sum(-1)
    np.testing.assert_allclose(seen, np.ones_like(seen), rtol=1e-6)


def test_sinks_take_their_part_of_the_weights():
    rng = np.random.default_rng(5)
    T, S, K, N, H = 5, 6, 2, 4, 8
    q, k, v = (rng.normal(size=shape) for shape in ((T, N, H), (S, K, H), (S, K, H)))
    visible, sinks = rng.random((T, S)) < 0.6, rng.normal(size=N) * 2
    visible[1] = False  # this one sees its sinks alone
    logits = 0.3 * products(*(jnp.asarray(x, jnp.float32) for x in (q, k)))
    weights, lse = softmax(logits, jnp.asarray(visible), jnp.asarray(sinks, jnp.float32))
    out = weighted_sum(weights, jnp.asarray(v, jnp.float32))
    plain_out, plain_lse = reference.attention(q, k, v, visible, 0.3)
    total = np.exp(plain_lse) + np.exp(sinks)[None]
    np.testing.assert_allclose(out, plain_out * (np.exp(plain_lse) / total)[..., None], atol=2e-6)
    np.testing.assert_allclose(np.asarray(lse).reshape(N, T).T, np.log(total), atol=2e-6)


def test_products_take_each_query_head_to_its_kv_head():
    q = np.arange(12.0).reshape(2, 6, 1)
    k = np.array([[[1.0], [100.0]], [[2.0], [200.0]]])
    found = products(jnp.asarray(q), jnp.asarray(k))
    for head, t, s in np.ndindex(6, 2, 2):
        assert found[head // 3, head % 3, t, s] == q[t, head, 0] * k[s, head // 3, 0]
