"""Attention of a chunk over itself and over stored tokens, against numpy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.pallas_kernels import prefill
from jkvq.pallas_kernels.prefill import ExactTokens, prefix_attention, self_attention
from tests.pallas_kernels.reference.test_paged_attention import LAYER, Stored
from tests.reference import attention

SCALE = 0.2


def assert_close(found, wanted, bound: float):
    for out, lse, (wanted_out, wanted_lse) in zip(*found, wanted, strict=True):
        assert np.linalg.norm(out - wanted_out) <= bound * np.linalg.norm(wanted_out)
        np.testing.assert_allclose(lse, wanted_lse, atol=2 * bound)


def check_prefix(cache: str, fused, dtype, bound: float, T: int = 5, mean=None, exact=()):
    """Stored tokens, and so many exact ones behind each sequence's."""
    lengths = [16, 0, 77]
    stored = Stored(cache, lengths, 2, 64, page_size=16)
    rng = np.random.default_rng(3)
    q = jnp.asarray(rng.normal(size=(3, T, 6, 64)), dtype)
    k, v = stored.decoded
    if mean is not None:
        k = k + np.repeat(np.asarray(mean), 16, axis=0)[None, : k.shape[1]]
    seen = [[x[b, :n] for x in (k, v)] for b, n in enumerate(lengths)]
    tokens = None
    if exact:
        new = rng.normal(size=(2, 3, max(exact), 2, 64))
        seen = [
            [np.concatenate([old, x[b, :n]]) for old, x in zip(seen[b], new, strict=True)]
            for b, n in enumerate(exact)
        ]
        real = np.arange(max(exact))[None] < np.array(exact)[:, None]
        new = np.where(real[..., None, None], new, np.nan).astype(np.float32)
        new_k, new_v = map(jnp.asarray, new)
        tokens = ExactTokens(new_k, new_v, jnp.asarray(exact, jnp.int32))
    run = jax.jit(
        lambda q, keys, values, table, length: prefix_attention(
            *(q, keys, values, *stored.codecs, LAYER, table, length, mean, tokens),
            scale=SCALE,
            fused=fused,
        )
    )
    found = run(q, *stored.sides, stored.table, jnp.asarray(lengths, jnp.int32))
    wanted = [
        attention(np.asarray(q[b], np.float64), k, v, np.ones((T, len(k)), bool), SCALE)
        for b, (k, v) in enumerate(seen)
    ]
    assert_close(found, wanted, bound)


def check_itself(fused, dtype, bound: float, T: int = 9):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, T, n, 64)), dtype) for n in (6, 2, 2))
    qs, ks, vs = (np.asarray(x, np.float64) for x in (q, k, v))
    causal = np.tril(np.ones((T, T), bool))
    wanted = [attention(qs[b], ks[b], vs[b], causal, SCALE) for b in range(2)]
    run = jax.jit(functools.partial(self_attention, scale=SCALE, fused=fused))
    assert_close(run(q, k, v), wanted, bound)


@pytest.mark.parametrize("cache", ["bf16", "int4", "tq-k3v2"])
def test_a_chunk_over_stored_tokens(cache):
    check_prefix(cache, "xla", jnp.float32, 1e-5)


def test_a_chunk_over_tokens_that_are_stored_without_a_mean():
    mean = jax.random.normal(jax.random.key(2), (5, 2, 64))
    check_prefix("int4", "xla", jnp.float32, 1e-5, mean=mean)


@pytest.mark.parametrize("block", [prefill._BLOCK, 3 * 32 * 6 * 5])
def test_exact_tokens_stand_behind_the_packed_ones(block, monkeypatch):
    monkeypatch.setattr(prefill, "_BLOCK", block)  # the second: two pages at once
    check_prefix("int4", "xla", jnp.float32, 1e-5, exact=(3, 0, 20))


def test_a_chunk_over_itself():
    check_itself("xla", jnp.float32, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["bf16", "int4", "int2", "int3", "tq-k3v3", "blockgtq-k3v3"])
def test_a_chunk_over_stored_tokens_by_cudnn(cache):
    check_prefix(cache, "cudnn", jnp.bfloat16, 2e-3, T=64)


@pytest.mark.gpu
def test_exact_tokens_stand_behind_the_packed_ones_by_cudnn():
    check_prefix("int4", "cudnn", jnp.bfloat16, 2e-3, T=64, exact=(3, 0, 20))


@pytest.mark.gpu
def test_a_chunk_over_itself_by_cudnn():
    check_itself("cudnn", jnp.bfloat16, 4e-3, T=64)  # the weights are rounded to bfloat16 within
