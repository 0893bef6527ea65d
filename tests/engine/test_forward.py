"""Tokens that are known, through the kernels: what evaluation sees is what generation runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.cache.layout import empty_cache
from jkvq.cache.shape import CacheShape
from jkvq.engine.forward import forward
from tests.tiny import CONFIG, tiny_llm

WIDE = dataclasses.replace(CONFIG, layers=1, head_dim=64, rope_divisors=(1.0,) * 32)


@pytest.mark.parametrize("kernels", ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)])
def test_known_tokens_through_the_kernels_give_what_the_reference_gives(kernels):
    """Rows of other lengths, the longer one past its windows; two chunks."""
    llm = tiny_llm("int4,sink=4,recent=8,page=16", config=WIDE)
    run = jax.jit(forward, static_argnums=0, static_argnames=("phase", "implementation"))
    tokens = np.random.default_rng(0).integers(0, 256, (2, 2, 20)).astype(np.int32)
    count = np.array([[20, 20], [20, 3]], np.int32)
    found = {}
    for implementation in ("reference", kernels):
        table = jnp.arange(1, 7, dtype=jnp.int32).reshape(2, 3)
        cache = empty_cache(llm.spec, CacheShape.of(WIDE), 7, table)
        hidden = []
        for chunk, counts in zip(tokens, count, strict=True):
            out, cache = run(
                *(llm.config, llm.params, llm.basis, cache, chunk, counts),
                phase="forced",
                implementation=implementation,
            )
            hidden.append(np.asarray(out))
        assert cache.length.tolist() == [40, 23]
        found[implementation] = np.concatenate(hidden, axis=1)
    for row, length in enumerate((40, 23)):
        expected, others = (found[name][row, :length] for name in ("reference", kernels))
        error = np.linalg.norm(others - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert error.max() < 2e-3
