import numpy as np
import pytest

from jkvq.cache.specs.page_rule import Windows
from jkvq.calibration.observe import WINDOWS, observe, place_tokens
from tests.calibration.numpy_model import layers_of, middles, moved, rope, stands
from tests.tiny import CONFIG

WINDOW = 80
TOKENS = [(7 * i * i + 3 * i) % 256 for i in range(200)]  # two windows and a half
G = CONFIG.heads // CONFIG.kv_heads


@pytest.fixture(scope="module")
def seen(tiny):
    """By window, then by layer."""
    parts = [TOKENS[i : i + WINDOW] for i in range(0, len(TOKENS), WINDOW)]
    return [layers_of(tiny.params, part) for part in parts]


def test_tokens_are_placed_over_the_context_but_for_a_windows_first():
    placed = np.stack([place_tokens(index, 2048, 8192, 64) for index in range(5)])
    np.testing.assert_array_equal(placed[:, :64], np.broadcast_to(np.arange(64), (5, 64)))
    rest = np.sort(placed[:, 64:].ravel())
    assert rest[0] >= 64 and rest[-1] < 8192
    assert np.diff(rest, prepend=64, append=8192).max() <= 4  # 8,128 places for 9,920 tokens
    np.testing.assert_array_equal(place_tokens(0, 40, 64, 64), np.arange(40))
    np.testing.assert_array_equal(place_tokens(3, 100, 1024, 16), stands(3, 100, 1024, 16))


def expected(seen, layer: int, head: int) -> dict[str, np.ndarray]:
    """Every moment of one layer and KV head, straight from its definition."""
    windows = [found[layer] for found in seen]
    heads = range(head * G, head * G + G)
    # A key receives queries that stand as far off as they do in the window.
    received = np.concatenate(
        [
            moved((w.S[n].T @ w.q[:, n])[:, None], WINDOW, i)[:, 0]
            for i, w in enumerate(windows)
            for n in heads
        ]
    )
    windows = [
        w._replace(q=moved(w.q, WINDOW, i), k=moved(w.k, WINDOW, i)) for i, w in enumerate(windows)
    ]
    in_page = [rope(w.k, -middles(len(w.k), WINDOW, i))[:, head] for i, w in enumerate(windows)]
    q = np.concatenate([w.q[:, n] for w in windows for n in heads])
    out = np.concatenate([w.S[n] @ w.v[:, head] for w in windows for n in heads])
    k, v, before = (
        np.concatenate([getattr(w, name)[:, head] for w in windows])
        for name in ("k", "v", "k_before_rope")
    )
    return {
        "qq": q.T @ q / len(q),
        "sq": received.T @ received / len(q),
        "kk": k.T @ k / len(k),
        "vv": v.T @ v / len(k),
        "output": out.T @ out / len(q),
        "k_mean": k.mean(0),
        "k_mean_before_rope": before.mean(0),
        "k_mean_in_page": np.concatenate(in_page).mean(0),
        "v_mean": v.mean(0),
        "output_mean": out.mean(0),
        "q_energy": (q[:, :8] ** 2 + q[:, 8:] ** 2).mean(0),
        "k_energy": (k[:, :8] ** 2 + k[:, 8:] ** 2).mean(0),
    }


def expected_read(
    seen, layer: int, head: int, windows: Windows, *, packed: bool
) -> dict[str, np.ndarray]:
    """The moments that scores weight: of all tokens, or of those that left the 16-bit windows."""
    sink, recent, page = windows.sink, windows.recent, windows.page
    sums: dict[str, np.ndarray | float] = {}
    for i, w in enumerate(found[layer] for found in seen):
        k, v = moved(w.k, len(w.k), i, sink=sink)[:, head], w.v[:, head]
        middle = middles(len(k), len(k), i, sink=sink, page=page)
        angle = np.outer(middle, CONFIG.rope_theta ** -(np.arange(0, 16, 2) / 16))
        k = np.concatenate([k, np.cos(angle), np.sin(angle)], axis=1)
        v = np.concatenate([v, np.ones((len(v), 1))], axis=1)
        for n in range(head * G, head * G + G):
            for t, q in enumerate(moved(w.q, len(w.q), i, sink=sink)[:, n]):
                left = max(0, (t + 1 - sink - recent) // page * page)  # whole pages
                tokens = slice(sink, sink + left) if packed else slice(0, t + 1)
                S = w.S[n, t, tokens]
                for name, x in {
                    "qq": S.sum() * np.outer(q, q),
                    "kk": (k[tokens] * S[:, None]).T @ k[tokens],
                    "vv": (v[tokens] * S[:, None]).T @ v[tokens],
                }.items():
                    sums[name] = sums.get(name, 0.0) + x / (len(w.q) * len(seen) * G)
    return {name: np.asarray(x) for name, x in sums.items()}


@pytest.mark.parametrize(("windows", "length"), [(WINDOWS, 450), (Windows(8, 24, 16), 100)])
def test_moments_of_what_is_read_equal_their_definitions(tiny, windows, length):
    tokens = [(5 * i * i + i) % 256 for i in range(2 * length)]
    seen = [layers_of(tiny.params, part) for part in (tokens[:length], tokens[length:])]
    moments, _ = observe(
        CONFIG, tiny.params, tokens, window=length, context=CONFIG.context, windows=windows
    )
    for layer, head in np.ndindex(CONFIG.layers, CONFIG.kv_heads):
        for kind in ("read", "packed"):
            wanted = expected_read(seen, layer, head, windows, packed=kind == "packed")
            for name, x in wanted.items():
                found = getattr(getattr(moments, kind), name)[layer, head]
                assert np.abs(x).max() > 0
                np.testing.assert_allclose(
                    found, x, atol=1e-5 * np.abs(x).max(), rtol=0, err_msg=f"{kind} {name}"
                )


def test_moments_equal_their_definitions(tiny, seen):
    moments, captured = observe(CONFIG, tiny.params, TOKENS, window=WINDOW, context=CONFIG.context)
    assert captured is None
    for layer, head in np.ndindex(CONFIG.layers, CONFIG.kv_heads):
        for name, wanted in expected(seen, layer, head).items():
            found = getattr(moments, name)[layer, head]
            assert found.dtype == np.float64
            np.testing.assert_allclose(
                found, wanted, atol=1e-5 * np.abs(wanted).max(), rtol=0, err_msg=name
            )


def test_captured_keys_and_values_are_the_models(tiny, seen):
    _, captured = observe(CONFIG, tiny.params, TOKENS, window=WINDOW, context=1024, capture=True)
    assert captured is not None
    for layer in range(CONFIG.layers):
        for found, name in ((captured.key, "k"), (captured.value, "v")):
            wanted = np.concatenate([getattr(w[layer], name) for w in seen])
            np.testing.assert_allclose(found[layer], wanted, atol=1e-5 * np.abs(wanted).max())
