import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jkvq
from jkvq.cache.basis import make_basis
from jkvq.cache.shape import CacheShape
from jkvq.calibration.clip import GRID, clip_errors
from jkvq.loading.calibrate import Corpus
from jkvq.models.config import LocalLayers
from tests import reference
from tests.calibration.numpy_model import layers_of
from tests.made_up import random_calibration
from tests.tiny import CONFIG, model_of

K, H, G = CONFIG.kv_heads, CONFIG.head_dim, CONFIG.heads // CONFIG.kv_heads
TEXT = Corpus("cubes", "".join(chr(97 + i**3 % 23) for i in range(80)))
SINK, RECENT, PAGE = 16, 16, 16
CACHE = f"oscar-int2,sink={SINK},recent={RECENT},page={PAGE}"


def test_chosen_clips_err_least(tiny, tmp_path):
    calibration = jkvq.calibrate(
        model_of(tiny), method="oscar", text=TEXT, tokens=80, out=tmp_path / "out", clip_for=CACHE
    ).calibration
    spec, tokens = jkvq.parse_spec(CACHE), tiny.tokenizer.encode(TEXT.text)
    basis = make_basis(spec, CacheShape.of(CONFIG), calibration, CONFIG.rope_frequency)
    count = jnp.array(len(tokens))
    found = clip_errors(CONFIG, tiny.params, basis, spec, jnp.asarray([tokens]), count)
    for index, layer in enumerate(layers_of(tiny.params, tokens)):
        sides = (calibration.key, _key_error), (calibration.value, _value_error)
        for number, (side, error) in enumerate(sides):
            assert side.all_tokens.rotation is not None
            assert side.clip is not None
            R = side.all_tokens.rotation[index].astype(np.float64)
            errors = [error(layer, R, clip) for clip in GRID]
            # Codes on a tie may fall otherwise in float32.
            np.testing.assert_allclose(found[number, index], errors, rtol=0.02)
            chosen = GRID[int(np.abs(np.array(GRID) - side.clip[index]).argmin())]
            assert errors[GRID.index(chosen)] <= min(errors) * 1.01


def test_local_layers_have_their_own_angles(tiny):
    """All layers local, in a window that holds the text: as layers with these angles."""
    theta, cache = 100.0, f"{CACHE},center=true"
    local = LocalLayers(tuple(range(CONFIG.layers)), 128, theta, CONFIG.rope_divisors)
    spec, found = jkvq.parse_spec(cache), []
    for own in ({"local": local}, {"rope_theta": theta}):
        config = dataclasses.replace(CONFIG, **own)
        shape = CacheShape.of(config)
        basis = make_basis(spec, shape, random_calibration(shape), *config.rope_frequencies)
        tokens = jnp.asarray([tiny.tokenizer.encode(TEXT.text)])
        found.append(clip_errors(config, tiny.params, basis, spec, tokens, jnp.array(80)))
    np.testing.assert_allclose(*found, rtol=1e-3)


def test_a_cache_that_does_not_clip_is_refused_before_the_text_is_read(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("jkvq.calibration.observe._observe_sequence", None)
    with pytest.raises(jkvq.UserError, match="clip_for=int4: this cache does not clip"):
        jkvq.calibrate(model_of(tiny), text=TEXT, tokens=80, out=tmp_path / "out", clip_for="int4")
    assert not (tmp_path / "out").exists()


def _coded(x: np.ndarray, R: np.ndarray, clip: float) -> np.ndarray:
    """Tokens [T, K, H] through the cache, back in their own basis."""
    out = np.empty_like(x)
    for t, k in np.ndindex(*x.shape[:2]):
        codes, scale, lo, _ = reference.affine_min_max(reference.clip(x[t, k] @ R[k], clip), 2, H)
        out[t, k] = (lo + scale * codes) @ R[k].T
    return out


def _packed(T: int) -> np.ndarray:
    """Which tokens each query reads packed, by storing one token after another.

    A page of the oldest tokens behind the sink is packed once ``RECENT`` newer ones are there.
    """
    packed, windowed = np.zeros((T, T), bool), []
    for t in range(T):
        packed[t] = packed[t - 1] if t else False
        windowed += [t] if t >= SINK else []
        if len(windowed) == PAGE + RECENT:
            packed[t, windowed[:PAGE]] = True
            windowed = windowed[PAGE:]
    return packed


def _key_error(layer, R, clip):
    coded, T, error = _coded(layer.k, R, clip), len(layer.k), 0.0
    for n in range(CONFIG.heads):
        logits = [layer.q[:, n] @ k[:, n // G].T / np.sqrt(H) for k in (layer.k, coded)]
        e = np.where(np.tri(T, dtype=bool), np.exp(np.where(_packed(T), *logits[::-1])), 0.0)
        out = e / e.sum(-1, keepdims=True) @ layer.v[:, n // G]
        error += ((out - layer.out[:, n]) ** 2).sum()
    return error


def _value_error(layer, R, clip):
    lost, error = _coded(layer.v, R, clip) - layer.v, 0.0
    for n in range(CONFIG.heads):
        packed = np.where(_packed(len(lost)), layer.S[n], 0.0)
        error += ((packed @ lost[:, n // G]) ** 2).sum()
    return error
