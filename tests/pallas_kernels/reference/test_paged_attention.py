import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.cache.basis import make_basis
from jkvq.cache.layout import abstract_groups
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.pallas_kernels.formats.codecs import Codec
from jkvq.pallas_kernels.formats.packed import Packed
from jkvq.pallas_kernels.reference.paged_attention import paged_attention
from jkvq.pallas_kernels.reference.scatter import scatter
from tests.made_up import random_calibration
from tests.reference import attention

PAGE, LAYERS, LAYER = 8, 3, 1


def _store(codec: Codec, pages: Packed, x, page, slot):
    """(pages with the tokens x, what they are decoded to), in one program."""

    @jax.jit
    def run(pages, x, page, slot):
        tokens = codec.encode(x)
        decoded = codec.decode(tokens, jnp.ones(page.shape, bool))
        return scatter(pages, tokens, LAYER, page, slot), decoded

    return run(pages, x, page, slot)


class Stored:
    """Sequences stored on shuffled pages; every other slot and page holds NaN or garbage."""

    def __init__(
        self,
        cache: str,
        lengths: list[int],
        K: int,
        H: int,
        columns: int | None = None,
        page_size: int = PAGE,
    ):
        spec = parse_spec(f"{cache},page={page_size}")
        shape = CacheShape(LAYERS, K, H)
        made_up = random_calibration(shape, centroids=spec.key.centroids, bits=spec.key.bits)
        basis = make_basis(spec, shape, made_up)
        self.codecs = basis.key.codec(LAYER), basis.value.codec(LAYER)
        columns = columns or max(1, -(-max(lengths) // page_size))
        pages, S = 1 + len(lengths) * columns, max(lengths)
        order = np.random.default_rng(0).permutation(np.arange(1, pages))
        table = order.reshape(len(lengths), columns).astype(np.int32)
        position = np.broadcast_to(np.arange(S), (len(lengths), S))
        page = np.take_along_axis(table, position // page_size, axis=1)
        page = np.where(position < np.asarray(lengths)[:, None], page, 0)
        group = abstract_groups(spec, shape, pages, 1)[0]
        self.table, self.sides, self.decoded = jnp.asarray(table), [], []
        rng = np.random.default_rng(1)
        for codec, side in zip(self.codecs, (group.key, group.value), strict=True):
            # 0xFFFF is a NaN in bfloat16, 0xFFFFFFFF in float32.
            garbage = jax.tree.map(lambda a: np.full(a.shape, np.iinfo(a.dtype).max, a.dtype), side)
            x = rng.normal(size=(len(lengths), S, K, H)).astype(np.float32)
            stored, decoded = _store(codec, garbage, x, page, position % page_size)
            self.sides.append(stored)
            self.decoded.append(np.asarray(decoded))

    def attend(self, q, length, scale):
        # jitted, as everything is that runs; the layer is static
        attend = jax.jit(
            lambda q, keys, values, table, length: paged_attention(
                q, keys, values, *self.codecs, LAYER, table, length, scale=scale
            )
        )
        return attend(q, *self.sides, self.table, jnp.asarray(length))


CACHES = ["f32", "bf16", "int8", "int4", "int3", "int2", "tq-k3v2"]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("groups", "head_dim"), [(4, 64), (1, 80)])
def test_attention_from_pages_equals_attention_over_what_is_decoded(cache, groups, head_dim):
    lengths = [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 0]
    stored = Stored(cache, lengths, 2, head_dim)
    q = jax.random.normal(jax.random.key(3), (len(lengths), 1, 2 * groups, head_dim))
    out, lse = stored.attend(q, np.asarray(lengths)[:, None], 0.2)
    k, v = stored.decoded
    for b, length in enumerate(lengths):
        visible = (np.arange(k.shape[1]) < length)[None]
        expected_out, expected_lse = attention(q[b], k[b], v[b], visible, 0.2)
        np.testing.assert_allclose(out[b], expected_out, atol=1e-5)
        np.testing.assert_allclose(lse[b], expected_lse, atol=1e-5)


@pytest.mark.parametrize(("groups", "head_dim"), [(2, 128), (8, 64), (1, 256), (3, 128)])
@pytest.mark.parametrize("cache", ["int4,group=64", "int2,group=32"])
def test_attention_from_pages_in_groups_of_channels(cache, groups, head_dim):
    stored = Stored(cache, [19, 8], 2, head_dim)
    q = jax.random.normal(jax.random.key(3), (2, 1, 2 * groups, head_dim))
    out, _ = stored.attend(q, np.array([[19], [8]]), 0.1)
    for b, length in enumerate((19, 8)):
        k, v = (x[b, :length] for x in stored.decoded)
        expected, _ = attention(q[b], k, v, np.ones((1, length), bool), 0.1)
        np.testing.assert_allclose(out[b], expected, atol=1e-5)


def test_a_length_per_query_is_causal():
    stored = Stored("int4", [30, 17], 2, 64)
    q = jax.random.normal(jax.random.key(3), (2, 5, 4, 64))
    length = np.array([[26, 27, 28, 29, 30], [13, 14, 0, 16, 17]])
    out, lse = stored.attend(q, length, 0.1)
    for b in range(2):
        visible = np.arange(30)[None] < length[b][:, None]
        k, v = (x[b] for x in stored.decoded)
        expected_out, expected_lse = attention(q[b], k, v, visible, 0.1)
        np.testing.assert_allclose(out[b], expected_out, atol=1e-5)
        np.testing.assert_allclose(lse[b], expected_lse, atol=1e-5)


def test_several_rounds_equal_jax_dot_product_attention():
    S = 1300  # the loop takes 512 tokens a round
    stored = Stored("f32", [S], 2, 32, columns=200)
    q = jax.random.normal(jax.random.key(3), (1, 1, 6, 32))
    out, _ = stored.attend(q, np.array([[S]]), 32**-0.5)
    with jax.default_matmul_precision("highest"):  # no TF32 on GPUs
        expected = jax.nn.dot_product_attention(q, *map(jnp.asarray, stored.decoded))
    np.testing.assert_allclose(out, expected, atol=3e-6)


@pytest.mark.parametrize("stream", [False, True])
def test_scatter_leaves_every_other_slot_alone(stream):
    shape = {"codes": (2, 3, 2, PAGE, 4), "params": (2, 3, 2, 3, PAGE), "index": (2, 3, PAGE)}
    if stream:
        shape["codes"] = (2, 3, 2, 4, PAGE)
    codes, params, index = (
        jnp.arange(np.prod(dims)).reshape(dims).astype(jnp.uint16) for dims in shape.values()
    )
    new = Packed(
        codes=jnp.full((1, 2, 2, 4), 60_001, jnp.uint16),
        params=jnp.full((1, 2, 2, 3), 60_002, jnp.uint16),
        index=jnp.full((1, 2), 60_003, jnp.uint16),
    )
    page, slot = np.array([[2, 1]]), np.array([[7, 0]])
    before = Packed(codes, params, index, stream)
    assert (before.page, before.kv_heads) == (PAGE, 2)
    after = scatter(before, new, 1, jnp.asarray(page), jnp.asarray(slot))
    expected = {name: np.array(getattr(before, name)) for name in shape}
    for p, s in zip(page[0], slot[0], strict=True):
        expected["codes"][
            (1, p, slice(None), slice(None), s) if stream else (1, p, slice(None), s)
        ] = 60_001
        expected["params"][1, p, :, :, s] = 60_002
        expected["index"][1, p, s] = 60_003
    for name, wanted in expected.items():
        np.testing.assert_array_equal(getattr(after, name), wanted)
