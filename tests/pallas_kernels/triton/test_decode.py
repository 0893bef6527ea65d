"""The decode kernel against attention in float64 over what the codecs decode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.cache.specs.presets import PRESETS
from jkvq.pallas_kernels.triton.decode import decode, merge_partials, plan_decode
from jkvq.pallas_kernels.types import DecodeSettings, Shift
from tests.pallas_kernels.reference.test_paged_attention import LAYER, Stored
from tests.reference import attention

SCALE = 0.2


def attend(
    stored: Stored, q, lengths, page, *, programs=10, shift=None, firsts=None, interpret=True
):
    """(out, lse), on a GPU the same twice."""
    settings = DecodeSettings(programs=programs, warps=2, stages=2)

    @jax.jit
    def run(q, keys, values, table, length, shift, first):
        plan = plan_decode(length, page=page, kv_heads=2, settings=settings, first=first)
        part = decode(
            *(q, keys, values, *stored.codecs, LAYER, table, plan, shift),
            scale=SCALE,
            interpret=interpret,
        )
        return merge_partials([part], q.shape[1], interpret=interpret)

    args = q, *stored.sides, stored.table, jnp.asarray(lengths), shift
    args = *args, None if firsts is None else jnp.asarray(firsts)
    out, lse = run(*args)
    if not interpret:
        np.testing.assert_array_equal(out, run(*args)[0])
    return out, lse


def assert_close(stored: Stored, q, lengths, out, lse, firsts=None):
    for b, length in enumerate(lengths):
        k, v = (x[b] for x in stored.decoded)
        token, first = np.arange(k.shape[0]), 0 if firsts is None else firsts[b]
        visible = ((token >= first) & (token < length))[None]
        wanted, wanted_lse = attention(np.asarray(q[b : b + 1], np.float64), k, v, visible, SCALE)
        error = np.linalg.norm(np.asarray(out[b]) - wanted[0])
        assert error <= 2e-3 * np.linalg.norm(wanted), (b, length)
        np.testing.assert_allclose(lse[b], wanted_lse[0], atol=1e-2)


def check(cache, groups, head_dim, page, dtype, interpret):
    lengths = [1, page - 1, page, page + 1, 3 * page, 0, 5 * page - 2]
    stored = Stored(cache, lengths, 2, head_dim, page_size=page)
    q = jax.random.normal(jax.random.key(3), (len(lengths), 2 * groups, head_dim), dtype)
    # One share for all, shares across sequences, idle shares.
    for programs in (1, 10, 64) if head_dim == 128 and not interpret else (10,):
        out, lse = attend(stored, q, lengths, page, programs=programs, interpret=interpret)
        assert_close(stored, q, lengths, out, lse)


@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("cache", ["int4", "bf16"])
def test_tokens_that_a_window_has_left_are_not_seen(cache, interpret):
    lengths, firsts = [1, 15, 40, 77, 64, 0], [0, 14, 3, 48, 33, 0]
    stored = Stored(cache, lengths, 2, 64, page_size=16)
    q = jax.random.normal(jax.random.key(3), (len(lengths), 4, 64), jnp.bfloat16)
    out, lse = attend(stored, q, lengths, 16, firsts=firsts, interpret=interpret)
    assert_close(stored, q, lengths, out, lse, firsts)


@pytest.mark.parametrize(
    ("cache", "groups"),
    [
        ("bf16", 4),  # FloatTiles
        ("int3,group=32", 1),  # AffineTiles, of two parts and with groups
        ("kmeans16-int4", 3),  # AffineTiles on centroids
        ("jkvq-int2", 2),  # DigitTiles
        ("tq-k3v2", 8),  # LevelTiles
        ("blockgtq-k3v3", 2),  # StreamTiles
    ],
)
def test_decode_step_by_step(cache, groups):
    check(cache, groups, 64, 16, jnp.bfloat16, interpret=True)


def check_shift(cache: str, by_slot: bool, interpret: bool):
    page, lengths = 16, [40, 1, 33]
    stored = Stored(cache, lengths, 2, 64, page_size=page)
    q = jax.random.normal(jax.random.key(3), (3, 4, 64), jnp.bfloat16)
    scores = jax.random.normal(jax.random.key(4), (3, 4, 7)) * 20
    number = np.arange(48)[None] // page + 2
    if by_slot:
        number = np.random.default_rng(0).integers(0, 7, (3, 48))
    # Queries of which each number meets its own turn
    queries, turns = jnp.pad(scores, ((0, 0), (0, 0), (0, 57))), jnp.eye(7, 64, dtype=jnp.float16)
    shift = Shift(queries, turns, jnp.asarray(number) if by_slot else None, 0 if by_slot else 2)
    out, lse = attend(stored, q, lengths, page, shift=shift, interpret=interpret)
    for b, n in np.ndindex(3, 4):
        every = np.asarray(scores, np.float64)[b, n, number[b % len(number)]]
        k, v = (x[b, : lengths[b], n // 2 : n // 2 + 1] for x in stored.decoded)
        # One more channel, which is the shift, for a query that is 1 there
        k = np.concatenate([k, every[: lengths[b], None, None]], axis=-1)
        v = np.concatenate([v, np.zeros_like(v[..., :1])], axis=-1)
        query = np.append(np.asarray(q[b, n], np.float64), 1.0)[None, None]
        visible = np.ones((1, lengths[b]), bool)
        wanted, wanted_lse = attention(query, k, v, visible, SCALE)
        error = np.linalg.norm(np.asarray(out[b, n]) - wanted[0, 0, :64])
        assert error <= 2e-3 * np.linalg.norm(wanted)
        np.testing.assert_allclose(lse[b, n], wanted_lse[0, 0], atol=1e-2)


@pytest.mark.parametrize(("cache", "by_slot"), [("jkvq-int2", False), ("bf16", True)])
def test_scores_are_shifted_by_page_or_by_slot(cache, by_slot):
    check_shift(cache, by_slot, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cache", "by_slot"), [("jkvq-int2", False), ("int4", False), ("bf16", True)]
)
def test_scores_are_shifted_on_a_gpu(cache, by_slot):
    check_shift(cache, by_slot, interpret=False)


def _kernel_of(preset) -> tuple:
    """What the kernel is compiled for; presets that differ otherwise are the same to it."""
    sides = preset.spec.key, preset.spec.value
    return tuple(
        (side.codec, side.bits, side.centroids > 0, side.allocation, side.digits) for side in sides
    )


SERVED = {_kernel_of(preset): name for name, preset in PRESETS.items() if name != "f32"}


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("cache", SERVED.values())
def test_decode_of_every_preset(cache, head_dim):
    cache = cache.replace("2048", "256")
    check(cache, {64: 3, 128: 4}[head_dim], head_dim, 64, jnp.bfloat16, interpret=False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cache", "groups", "head_dim", "page"),
    [
        ("bf16", 8, 256, 64),
        ("int4", 8, 256, 64),
        ("int2", 5, 256, 32),
        ("int4,group=32", 1, 128, 128),
        ("int2,group=64", 16, 128, 16),
        ("int3,group=32", 2, 128, 32),
        ("jkvq-int2", 4, 256, 64),
        ("jkvq-int3,key.digits=2+1+1+0", 4, 128, 64),
    ],
)
def test_decode_of_groups_pages_and_wide_heads(cache, groups, head_dim, page):
    check(cache, groups, head_dim, page, jnp.float32, interpret=False)
