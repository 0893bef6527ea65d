import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkvq
from jkvq.calibration.learning.attend import attend, attend_fused, serves_fused
from jkvq.calibration.learning.passes import ALIKE

SPEC = jkvq.parse_spec("jkvq-int2,sink=16,recent=16,page=16")


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize(
    ("implementation", "dtype", "off"),
    [
        ("xla", jnp.float32, 1e-5),
        pytest.param("cudnn", jnp.bfloat16, 0.02, marks=pytest.mark.gpu),
    ],
)
def test_one_kernel_gives_what_blocks_do(window, coded, implementation, dtype, off):
    """And its gradients, each within a part of the greatest."""
    B, T, N, K, H = 2, 128, 6, 2, 64
    keys = jax.random.split(jax.random.key(0), 6)
    heads = (N, K, K, K, K) if coded else (N, K, K)
    q, *kv = (jax.random.normal(key, (B, T, n, H)) for key, n in zip(keys, heads, strict=False))
    spec, weight = (SPEC if coded else None), jax.random.normal(keys[5], (B, T, N, H))

    def blocks(q, *kv):
        return jnp.stack([attend(spec, 0.125, window, *each) for each in zip(q, *kv, strict=True)])

    def fused(q, *kv):
        q, kv = q.astype(dtype), [x.astype(dtype) for x in kv]
        out = attend_fused(spec, 0.125, window, q, *kv, implementation=implementation)
        return out.astype(jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def forth_and_back(f, *args):
        out, back = jax.vjp(f, *args)
        return out, *back(weight)

    expected, found = (forth_and_back(f, q, *kv) for f in (blocks, fused))
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, atol=off * np.abs(one).max(), rtol=0)


def test_the_kernel_is_taken_where_cudnn_has_it(monkeypatch):
    def served(*shape: int, dtype=jnp.bfloat16, sinks=None) -> bool:
        return serves_fused(jnp.zeros(shape, dtype), sinks)

    usual = 1, 32, 2, 64
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert not served(*usual)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert served(*usual) and served(1, 32, 2, 128)
    assert not served(*usual, dtype=jnp.float16) and not served(*usual, dtype=jnp.float32)
    assert not served(1, 31, 2, 64) and not served(1, 32, 2, 256) and not served(1, 32, 2, 60)
    assert not served(*usual, sinks=jnp.zeros(2))


@pytest.mark.gpu
def test_two_runs_give_the_same_numbers():
    """Of cuDNN's way back, which may add in any order unless it is told not to."""
    keys = jax.random.split(jax.random.key(1), 6)
    shapes = [(4, 1024, n, 64) for n in (6, 2, 2, 2, 2)]
    args = [
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys[:5], shapes, strict=True)
    ]
    weight = jax.random.normal(keys[5], shapes[0], jnp.bfloat16)

    @functools.partial(jax.jit, compiler_options=ALIKE)
    def back(*args):
        return jax.vjp(functools.partial(attend_fused, SPEC, 0.125, None), *args)[1](weight)

    first, *others = (back(*args) for _ in range(4))
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)
