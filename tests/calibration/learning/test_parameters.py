import dataclasses

import jax
import numpy as np
import pytest

from jkvq.cache.basis import make_basis
from jkvq.cache.calibrated import Calibration, SideCalibration, Transform
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.calibration.learning.parameters import (
    Learned,
    starting_from,
    turned,
    unchanged,
    with_learned,
)

L, K, H = 2, 2, 16
SPEC = parse_spec("jkvq-int2")


def _calibration(seed: int) -> Calibration:
    rng = np.random.default_rng(seed)

    def side() -> SideCalibration:
        spread = -np.sort(-rng.uniform(0.1, 4, (L, K, H)))
        rotation = rng.normal(size=(L, K, H, H)) + 4 * np.eye(H)
        mean = rng.normal(size=(L, K, H))
        return SideCalibration(Transform(*(x.astype(np.float32) for x in (mean, rotation, spread))))

    return Calibration(side(), side(), "jkvq")


def _changed(like: dict[str, Learned], size: float) -> dict[str, Learned]:
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return structure.unflatten(
        [size * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
    )


@pytest.mark.parametrize("cache", ["jkvq-int2", "jkvq-int2,key.bits=4@1,key.digits=none@1"])
def test_the_artefact_gives_the_cache_what_was_learned(cache):
    """make_basis, which reads any artefact, finds the matrices and means that learning ran with."""
    calibration, spec = _calibration(0), parse_spec(cache)
    start = starting_from(calibration, spec, L)
    learned = _changed(unchanged(start), 0.3)
    found = with_learned(calibration, spec, start, learned)
    basis = make_basis(spec, CacheShape(L, K, H), found, np.ones(H // 2, np.float32))
    now = {name: jax.jit(turned)(start[name], learned[name]) for name in start}
    for layer in range(L):
        for name, side in zip(now, basis.layer(layer), strict=True):
            assert side.matrices is not None
            assert side.mean is not None
            for every, of_all in zip(side.matrices, now[name][1:], strict=True):
                own, expected = np.asarray(every[layer]), np.asarray(of_all[layer])
                # But for what evens the matrix and its dual out
                scale = np.median(own / expected, axis=(-2, -1), keepdims=True)
                np.testing.assert_allclose(own / scale, expected, rtol=2e-3, atol=2e-4)
            np.testing.assert_allclose(side.mean[layer], now[name].mean[layer], rtol=1e-6)


def test_other_caches_keep_what_they_had():
    calibration = _calibration(0)
    start = starting_from(calibration, SPEC, L)
    found = with_learned(calibration, SPEC, start, _changed(unchanged(start), 0.3))
    assert found.key.all_tokens is calibration.key.all_tokens
    assert found.value.all_tokens is calibration.value.all_tokens


def test_nothing_learned_changes_nothing():
    calibration = _calibration(1)
    start = starting_from(calibration, SPEC, L)
    found = with_learned(calibration, SPEC, start, unchanged(start))
    for name in ("key", "value"):
        side, before = getattr(found, name), getattr(calibration, name)
        for part in ("mean", "rotation", "spread"):
            now, then = getattr(side.past_windows, part), getattr(before.all_tokens, part)
            np.testing.assert_allclose(now, then, rtol=1e-4, atol=1e-5)


def test_matrices_stay_well_conditioned_whatever_is_learned():
    calibration = _calibration(2)
    start = starting_from(calibration, SPEC, L)
    found = with_learned(calibration, SPEC, start, _changed(unchanged(start), 3.0))
    rotation, before = found.key.past_windows.rotation, calibration.key.all_tokens.rotation
    assert rotation is not None
    assert before is not None
    grown = np.linalg.cond(rotation) / np.linalg.cond(before)
    assert grown.max() < 16.1
    assert dataclasses.replace(found.key.past_windows, rotation=None, mean=None).spread is not None
