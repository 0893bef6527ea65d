import numpy as np
import pytest

from jkvq.calibration.moments import observe
from tests.calibration.numpy_model import layers_of
from tests.tiny import CONFIG

WINDOW = 40
TOKENS = [(7 * i * i + 3 * i) % 256 for i in range(100)]  # two windows and a half
G = CONFIG.heads // CONFIG.kv_heads


@pytest.fixture(scope="module")
def seen(tiny):
    """By window, then by layer."""
    parts = [TOKENS[i : i + WINDOW] for i in range(0, len(TOKENS), WINDOW)]
    return [layers_of(tiny.params, part) for part in parts]


def expected(seen, layer: int, head: int) -> dict[str, np.ndarray]:
    """Every moment of one layer and KV head, straight from its definition."""
    windows = [found[layer] for found in seen]
    heads = range(head * G, head * G + G)
    q = np.concatenate([w.q[:, n] for w in windows for n in heads])
    received = np.concatenate([w.S[n].T @ w.q[:, n] for w in windows for n in heads])
    out = np.concatenate([w.S[n] @ w.v[:, head] for w in windows for n in heads])
    k, v, before = (
        np.concatenate([getattr(w, name)[:, head] for w in windows])
        for name in ("k", "v", "k_before_rope")
    )
    weight = np.concatenate([sum(w.S[n].sum(0) for n in heads) / G for w in windows])
    return {
        "qq": q.T @ q / len(q),
        "sq": received.T @ received / len(q),
        "kk": k.T @ k / len(k),
        "vv": v.T @ v / len(k),
        "weighted_vv": (v * weight[:, None]).T @ v / len(k),
        "output": out.T @ out / len(q),
        "k_mean": k.mean(0),
        "k_mean_before_rope": before.mean(0),
        "v_mean": v.mean(0),
        "output_mean": out.mean(0),
        "q_energy": (q[:, :8] ** 2 + q[:, 8:] ** 2).mean(0),
        "k_energy": (k[:, :8] ** 2 + k[:, 8:] ** 2).mean(0),
    }


def test_moments_equal_their_definitions(tiny, seen):
    moments, captured = observe(CONFIG, tiny.params, TOKENS, window=WINDOW)
    assert captured is None
    for layer, head in np.ndindex(CONFIG.layers, CONFIG.kv_heads):
        for name, wanted in expected(seen, layer, head).items():
            found = getattr(moments, name)[layer, head]
            assert found.dtype == np.float64
            np.testing.assert_allclose(
                found, wanted, atol=1e-5 * np.abs(wanted).max(), rtol=0, err_msg=name
            )


def test_captured_keys_and_values_are_the_models(tiny, seen):
    _, captured = observe(CONFIG, tiny.params, TOKENS, window=WINDOW, capture=True)
    assert captured is not None
    for layer in range(CONFIG.layers):
        for found, name in ((captured.key, "k"), (captured.value, "v")):
            wanted = np.concatenate([getattr(w[layer], name) for w in seen])
            np.testing.assert_allclose(found[layer], wanted, atol=1e-5 * np.abs(wanted).max())
