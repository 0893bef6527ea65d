"""Tokens that are known, through the kernels: what evaluation sees is what generation runs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.cache.layout import empty_cache
from jkvq.cache.shape import CacheShape
from jkvq.engine.forward import forward
from jkvq.llm import LLM
from tests.tiny import CONFIG, tiny_llm

WIDE = dataclasses.replace(CONFIG, layers=1, head_dim=64, rope_divisors=(1.0,) * 32)
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 40)).astype(np.int32)
LENGTHS = 40, 23


@functools.cache
def wide_llm(cache: str) -> LLM:
    return tiny_llm(cache, config=WIDE)


def run(chunk: int, llm: LLM, **how) -> np.ndarray:
    """Hidden states of all tokens, so many at a time; the longer row goes past its windows."""
    table = jnp.arange(1, 7, dtype=jnp.int32).reshape(2, 3)
    cache, hidden = empty_cache(llm.spec, CacheShape.of(WIDE), 7, table), []
    for start in range(0, 40, chunk):
        count = np.clip(np.asarray(LENGTHS) - start, 0, chunk).astype(np.int32)
        tokens = TOKENS[:, start : start + chunk]
        out, cache = forward(
            llm.config, llm.params, llm.basis, cache, jnp.asarray(tokens), jnp.asarray(count), **how
        )
        assert out.dtype == llm.params["embedding"].dtype
        hidden.append(np.asarray(out, np.float32))
    assert cache.sequences.length.tolist() == list(LENGTHS)
    return np.concatenate(hidden, axis=1)


@pytest.mark.parametrize("kernels", ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)])
def test_known_tokens_through_the_kernels_give_what_decode_gives(kernels):
    llm = wide_llm("int4,sink=4,recent=8,page=16")
    found = run(20, llm, phase="forced", implementation=kernels)
    expected = run(1, llm, phase="decode", implementation="reference")
    for a, b, length in zip(found, expected, LENGTHS, strict=True):
        error = np.linalg.norm((a - b)[:length], axis=-1) / np.linalg.norm(b[:length], axis=-1)
        # Assembly rounds ties to even, which turns a code here and there.
        assert error.max() < (3e-3 if kernels == "interpret" else 3e-2)
        assert np.median(error) < 3e-3


@pytest.mark.parametrize(
    ("implementation", "phase", "chunk"),
    [
        ("reference", "prefill", 20),
        ("reference", "decode", 1),
        ("interpret", "prefill", 20),
        pytest.param("pallas", "prefill", 20, marks=pytest.mark.gpu),
        pytest.param("pallas", "decode", 1, marks=pytest.mark.gpu),
    ],
)
def test_a_model_in_float16_gives_what_it_gives_in_float32(implementation, phase, chunk):
    wide = wide_llm("bf16,page=16")
    params = jax.tree.map(lambda x: x.astype(jnp.float16), wide.params)
    narrow = dataclasses.replace(wide, params=params)
    found = run(chunk, narrow, phase=phase, implementation=implementation)
    expected = run(chunk, wide, phase=phase, implementation="reference")
    for a, b, length in zip(found, expected, LENGTHS, strict=True):
        error = np.linalg.norm((a - b)[:length], axis=-1) / np.linalg.norm(b[:length], axis=-1)
        assert error.max() < 1e-2  # where a number is stored as another bfloat16
        assert np.median(error) < 3e-3  # that of a model in bfloat16 is 1e-2
