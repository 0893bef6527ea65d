"""What a cache gives back, computed without it, against the cache itself."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.attention.attend import LayerAttention
from jkvq.attention.step_plan import plan_step
from jkvq.cache.layout import empty_cache
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.evaluation.reconstruct import TokenWise, attend_reconstructed
from jkvq.llm import checked_basis
from jkvq.pallas_kernels.types import NewHeads
from tests.made_up import random_calibration
from tests.tiny import CONFIG

CACHES = [
    ("int4,page=8", 1),
    ("jkvq-int2,sink=4,recent=16,page=8,window_bits=8", 1),
    ("jkvq-int4,exact_layers=1", 1),
    ("jkvq-int2,recent=16,page=8,key.bits=4@1,key.digits=none@1,value.bits=3@1", 1),
    ("int4,page=8,key.bits=8@1", 0),
    ("kmeans16-bdr-int4", 1),
    ("blockgtq-k3v3", 1),
]


@pytest.mark.parametrize(("cache", "layer"), CACHES)
def test_queries_read_what_the_cache_gives_back(cache, layer):
    config = dataclasses.replace(CONFIG, head_dim=32, rope_divisors=(1.0,) * 16)
    spec, T = parse_spec(cache), 96
    basis = checked_basis(config, spec, random_calibration(CacheShape(2, 2, 32)))
    rng = np.random.default_rng(layer)
    q, k, v = (jnp.asarray(rng.normal(size=(1, T, n, 32)), jnp.float32) for n in (4, 2, 2))

    stored = empty_cache(spec, CacheShape.of(config), 16, jnp.arange(1, 15)[None])
    _, value = basis.layer(layer)
    entered = value.enter(v, layer, None)
    # A chunk sees itself without rounding: with windows, only the last token is compared.
    cuts, outs = [0, T - 1, T] if spec.windowed else [0, T], []
    for start, stop in itertools.pairwise(cuts):
        part = slice(start, stop)
        count = jnp.array([stop - start])
        how: Any = {"phase": "forced", "implementation": "reference"}
        shape = {"spec": spec, "shape": CacheShape.of(config), "group": 2, "width": stop - start}
        plan = plan_step(stored.sequences, basis, count, **shape, **how)
        attend = LayerAttention.of(
            layer, spec, CacheShape.of(config), basis, plan, scale=0.1, **how
        )
        out, groups = jax.jit(LayerAttention.__call__)(
            attend, *(NewHeads.of(x[:, part]) for x in (q, k, entered)), stored.groups
        )
        after = stored.sequences.longer_by(count)
        stored = dataclasses.replace(stored, groups=groups, sequences=after)
        outs.append(out)
    last = slice(cuts[-2], T)
    out = np.asarray(outs[-1]).reshape(-1, 2, 2, 32)
    if value.matrices is not None:  # the output comes in the basis of the values
        R = np.asarray(value.rotation(layer), np.float64)
        out = np.einsum("tkgi,kih->tkgh", out, np.broadcast_to(np.linalg.inv(R), (2, 32, 32)))
    if value.mean is not None:
        out = out + np.asarray(value.mean)[layer][None, :, None]

    found = jax.jit(attend_reconstructed, static_argnames="scale")(
        *(TokenWise(spec, basis).layer(layer), q[0, last], k[0], v[0], jnp.arange(T)[last]),
        scale=0.1,
    )
    error = np.abs(np.asarray(found) - out.reshape(found.shape))
    # Products of other shapes round otherwise in the last bit, which turns codes on a tie.
    assert np.median(error) < (2e-4 if spec.windowed else 1e-5)
    assert error.max() < 2e-2
