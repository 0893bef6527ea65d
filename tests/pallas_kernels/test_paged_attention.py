import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.pallas_kernels.paged_attention import paged_attention
from jkvq.pallas_kernels.words import to_words
from jkvq.pallas_kernels.write import write
from tests.pallas_kernels.dense import dense_attention

PAGE, LAYERS, LAYER = 8, 3, 1


def _stored(lengths, K, H, words=jnp.uint32, columns=None):
    """Pages full of NaN in which sequences of these lengths are stored on shuffled pages."""
    columns = columns or max(1, -(-max(lengths) // PAGE))
    pages = 1 + len(lengths) * columns
    nan = to_words(jnp.full((LAYERS, pages, K, PAGE, H), jnp.nan), words)
    order = np.random.default_rng(0).permutation(np.arange(1, pages))
    table = order.reshape(len(lengths), columns).astype(np.int32)
    S = max(lengths)
    k = jax.random.normal(jax.random.key(1), (len(lengths), S, K, H))
    v = jax.random.normal(jax.random.key(2), (len(lengths), S, K, H))
    position = np.broadcast_to(np.arange(S), (len(lengths), S))
    page = np.take_along_axis(table, position // PAGE, axis=1)
    page = np.where(position < np.asarray(lengths)[:, None], page, 0)
    keys, values = write(nan, nan, k, v, LAYER, jnp.asarray(page), jnp.asarray(position % PAGE))
    return keys, values, jnp.asarray(table), k, v


@pytest.mark.parametrize(
    ("groups", "head_dim"), [(1, 64), (2, 80), (4, 128), (8, 64), (1, 256), (3, 16)]
)
def test_paged_attention_equals_dense_at_every_page_boundary(groups, head_dim):
    lengths = [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 0]
    keys, values, table, k, v = _stored(lengths, 2, head_dim)
    q = jax.random.normal(jax.random.key(3), (len(lengths), 1, 2 * groups, head_dim))
    length = jnp.asarray(lengths)[:, None]
    out, lse = paged_attention(q, keys, values, LAYER, table, length, scale=0.2)
    for b, stored in enumerate(lengths):
        visible = (np.arange(k.shape[1]) < stored)[None]
        expected_out, expected_lse = dense_attention(q[b], k[b], v[b], visible, 0.2)
        np.testing.assert_allclose(out[b], expected_out, atol=3e-6)
        np.testing.assert_allclose(lse[b], expected_lse, atol=3e-6)


def test_paged_attention_with_a_length_per_query_is_causal():
    keys, values, table, k, v = _stored([30, 17], 2, 16)
    q = jax.random.normal(jax.random.key(3), (2, 5, 4, 16))
    length = np.array([[26, 27, 28, 29, 30], [13, 14, 0, 16, 17]])
    out, lse = paged_attention(q, keys, values, LAYER, table, jnp.asarray(length), scale=0.5)
    for b in range(2):
        visible = np.arange(30)[None] < length[b][:, None]
        expected_out, expected_lse = dense_attention(q[b], k[b], v[b], visible, 0.5)
        np.testing.assert_allclose(out[b], expected_out, atol=3e-6)
        np.testing.assert_allclose(lse[b], expected_lse, atol=3e-6)


def test_paged_attention_over_several_rounds_equals_jax_dot_product_attention():
    S = 1300  # the loop takes 512 tokens a round
    keys, values, table, k, v = _stored([S], 2, 32, columns=200)
    q = jax.random.normal(jax.random.key(3), (1, 1, 6, 32))
    out, _ = paged_attention(q, keys, values, LAYER, table, jnp.array([[S]]), scale=32**-0.5)
    with jax.default_matmul_precision("highest"):  # no TF32 on GPUs
        expected = jax.nn.dot_product_attention(q, k, v)
    np.testing.assert_allclose(out, expected, atol=3e-6)


def test_paged_attention_of_16_bit_words_sees_rounded_keys_and_values():
    keys, values, table, k, v = _stored([20], 2, 16, words=jnp.uint16)
    q = jax.random.normal(jax.random.key(3), (1, 1, 4, 16))
    out, _ = paged_attention(q, keys, values, LAYER, table, jnp.array([[20]]), scale=0.25)
    k, v = (x[0].astype(jnp.bfloat16).astype(jnp.float32) for x in (k, v))
    expected, _ = dense_attention(q[0], k, v, np.ones((1, 20), bool), 0.25)
    np.testing.assert_allclose(out[0], expected, atol=3e-6)


def test_write_leaves_every_other_slot_alone():
    before = jnp.arange(2 * 3 * 2 * PAGE * 4, dtype=jnp.uint32).reshape(2, 3, 2, PAGE, 4)
    k, v = jax.random.normal(jax.random.key(0), (2, 1, 2, 2, 4))
    page, slot = jnp.array([[2, 1]]), jnp.array([[7, 0]])
    keys, values = write(before, before, k, v, 1, page, slot)
    for after, new in ((keys, k), (values, v)):
        expected = np.asarray(before).copy()
        for t in range(2):
            expected[1, page[0, t], :, slot[0, t]] = np.asarray(new)[0, t].view(np.uint32)
        np.testing.assert_array_equal(after, expected)
