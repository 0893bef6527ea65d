import numpy as np
import pytest

import jkvq
from jkvq.calibration.clip import GRID
from jkvq.loading.calibrate import Corpus
from tests import reference
from tests.calibration.numpy_model import layers_of
from tests.tiny import CONFIG

K, H, G = CONFIG.kv_heads, CONFIG.head_dim, CONFIG.heads // CONFIG.kv_heads
TEXT = Corpus("cubes", "".join(chr(97 + i**3 % 23) for i in range(80)))
SINK, RECENT = 4, 8


def test_chosen_clips_err_least(tiny, tmp_path):
    cache = f"oscar-int2,sink={SINK},recent={RECENT},page=8"
    calibration = jkvq.calibrate(
        tiny, method="oscar", text=TEXT, tokens=80, out=tmp_path / "out", clip_for=cache
    ).calibration
    tokens = tiny.tokenizer.hf.encode(TEXT.text, add_special_tokens=False)
    for index, layer in enumerate(layers_of(tiny.params, tokens)):
        for side, error in ((calibration.key, _key_error), (calibration.value, _value_error)):
            assert side.all_tokens.rotation is not None
            assert side.clip is not None
            R = side.all_tokens.rotation[index].astype(np.float64)
            errors = [error(layer, R, clip) for clip in GRID]
            chosen = GRID[int(np.abs(np.array(GRID) - side.clip[index]).argmin())]
            # Codes on a tie may fall otherwise in float32.
            assert errors[GRID.index(chosen)] <= min(errors) * 1.01


def test_a_cache_that_does_not_clip_is_refused_before_the_text_is_read(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("jkvq.calibration.observe._observe_sequence", None)
    with pytest.raises(jkvq.UserError, match="clip_for=int4: this cache does not clip"):
        jkvq.calibrate(tiny, text=TEXT, tokens=80, out=tmp_path / "out", clip_for="int4")
    assert not (tmp_path / "out").exists()


def _coded(x: np.ndarray, R: np.ndarray, clip: float) -> np.ndarray:
    """Tokens [T, K, H] through the cache, back in their own basis."""
    out = np.empty_like(x)
    for t, k in np.ndindex(*x.shape[:2]):
        codes, scale, lo, _ = reference.affine_min_max(reference.clip(x[t, k] @ R[k], clip), 2, H)
        out[t, k] = (lo + scale * codes) @ R[k].T
    return out


def _exact(T: int) -> np.ndarray:
    t, s = np.ogrid[:T, :T]
    return (s < SINK) | (s > t - RECENT)


def _key_error(layer, R, clip):
    coded, T, error = _coded(layer.k, R, clip), len(layer.k), 0.0
    for n in range(CONFIG.heads):
        logits = [layer.q[:, n] @ k[:, n // G].T / np.sqrt(H) for k in (layer.k, coded)]
        e = np.where(np.tri(T, dtype=bool), np.exp(np.where(_exact(T), *logits)), 0.0)
        out = e / e.sum(-1, keepdims=True) @ layer.v[:, n // G]
        error += ((out - layer.out[:, n]) ** 2).sum()
    return error


def _value_error(layer, R, clip):
    lost, error = _coded(layer.v, R, clip) - layer.v, 0.0
    for n in range(CONFIG.heads):
        packed = np.where(_exact(len(lost)), 0.0, layer.S[n])
        error += ((packed @ lost[:, n // G]) ** 2).sum()
    return error
