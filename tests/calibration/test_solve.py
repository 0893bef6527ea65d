"""Artefacts of the tiny model against float64 computations from its captured activations."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import jkvq
from jkvq.loading.calibrate import Corpus
from tests.calibration.numpy_model import about, layers_of, middles, moved, rope
from tests.tiny import CONFIG, model_of, tiny_model

TEXT = Corpus("squares", "".join(chr(97 + i * i % 23) for i in range(300)))
TOKENS = 240
K, H, G = CONFIG.kv_heads, CONFIG.head_dim, CONFIG.heads // CONFIG.kv_heads


@pytest.fixture(scope="module")
def seen(tiny):
    """Every layer, with queries and keys where a calibration has them stand."""
    tokens = tiny.tokenizer.hf.encode(TEXT.text, add_special_tokens=False)[:TOKENS]
    layers = layers_of(tiny.params, tokens)
    return [x._replace(q=moved(x.q, TOKENS, 0), k=moved(x.k, TOKENS, 0)) for x in layers]


def made(llm, tmp_path, method: str, **options) -> jkvq.Artefact:
    return jkvq.calibrate(
        model_of(llm), method=method, text=TEXT, tokens=TOKENS, out=tmp_path / "out", **options
    )


def query_moment(layer, head: int) -> np.ndarray:
    q = layer.q[:, head * G : head * G + G].reshape(-1, H)
    return q.T @ q / len(q)


def output_moment(layer, head: int) -> np.ndarray:
    out = layer.out[:, head * G : head * G + G].reshape(-1, H)
    return out.T @ out / len(out)


def check_oscar(R: np.ndarray, C: np.ndarray) -> None:
    """R = U Had P_br with the eigenvectors of C in U, whose signs may fall otherwise on ties."""
    order = [int(f"{i:04b}"[::-1], 2) for i in range(H)]
    U = np.empty((H, H))
    U[:, order] = R  # the permutation undone
    check_eigenvectors(U @ (scipy.linalg.hadamard(H) / 4).T, C)
    np.testing.assert_allclose(R @ R.T, np.eye(H), atol=1e-6)
    diagonal = np.diag(R.T @ C @ R)
    np.testing.assert_allclose(diagonal, np.full(H, diagonal.mean()), rtol=1e-5)


def check_eigenvectors(U: np.ndarray, C: np.ndarray) -> None:
    values = np.linalg.svd(C)[1]  # descending
    np.testing.assert_allclose(U.T @ C @ U, np.diag(values), atol=1e-5 * values[0])
    assert (U[np.abs(U).argmax(0), np.arange(H)] > 0).all()


@pytest.mark.parametrize("shared", [False, True])
def test_oscar_rotations_equal_numpys(tiny, seen, tmp_path, shared):
    artefact = made(tiny, tmp_path, "oscar", shared=shared)
    for index, layer in enumerate(seen):
        seconds = {
            "key": [query_moment(layer, k) for k in range(K)],
            "value": [output_moment(layer, k) for k in range(K)],
        }
        for name, second in seconds.items():
            found = (
                getattr(artefact.calibration, name).all_tokens.rotation[index].astype(np.float64)
            )
            for head in range(K):
                C = np.mean(second, axis=0) if shared else second[head]
                check_oscar(found[head], C)
            assert (found[0] == found[1]).all() == shared


@pytest.mark.parametrize("shared", [False, True])
def test_balanced_rotations_equal_numpys(tiny, seen, tmp_path, shared):
    """P = M M^T is the one positive solution of P C P = E, and P^(-1/2) M are eigenvectors.

    No token has left the windows: past them the moments are those of all, damped more.
    """
    calibration = made(tiny, tmp_path, "jkvq", shared=shared).calibration
    for index, layer in enumerate(seen):
        moments = {"key": [], "value": []}
        W = np.asarray(tiny.params["layers"][index]["attention"]["o"]["weight"], np.float64)
        for head in range(K):
            heads = range(head * G, head * G + G)
            received = np.sum([layer.S[n].sum(0) for n in heads], axis=0)
            columns = [W[:, n * H : n * H + H] for n in heads]
            reading = query_moment(layer, head), sum(w.T @ w for w in columns)
            for name, x, E in zip(moments, (layer.k, layer.v), reading, strict=True):
                # Values have no positions.
                middle = middles(TOKENS, TOKENS, 0) * (name == "key")
                mean, centred = about(x[:, head], received, middle)
                moments[name].append(((centred * received[:, None]).T @ centred, E))
                found, atol = getattr(calibration, name), 1e-5 * np.abs(mean).max()
                np.testing.assert_allclose(found.all_tokens.mean[index, head], mean, atol=atol)
                plain = about(x[:, head], np.ones(TOKENS), middle)[0]
                np.testing.assert_allclose(found.past_windows.mean[index, head], plain, atol=atol)
        for name, pairs in moments.items():
            found = getattr(calibration, name)
            for head, (transform, damping) in itertools.product(
                range(K), ((found.all_tokens, 1e-3), (found.past_windows, 3e-2))
            ):
                C, E = np.mean(pairs, axis=0) if shared else pairs[head]
                C, E = (x + damping * np.trace(x) / H * np.eye(H) for x in (C, E))
                M = transform.rotation[index, head].astype(np.float64)
                P = M @ M.T
                back = P @ C @ P
                # Angles are float32 numbers of up to a thousand there.
                np.testing.assert_allclose(
                    back * np.trace(E) / np.trace(back), E, atol=2e-4 * np.abs(E).max()
                )
                half = scipy.linalg.sqrtm(P)
                check_eigenvectors(np.linalg.inv(half) @ M, half @ C @ half)
                spread = transform.spread[index, head]
                # The sums here are means there.
                variance = np.diag(M.T @ C @ M)
                np.testing.assert_allclose(
                    variance / variance.sum(), spread / spread.sum(), rtol=0, atol=3e-6
                )


def test_tokens_past_windows_have_rotations_of_their_own(tiny, tmp_path):
    long = Corpus("squares", "".join(chr(97 + i * i % 23) for i in range(500)))
    found = jkvq.calibrate(model_of(tiny), text=long, tokens=500, out=tmp_path / "long").calibration
    for side, part in itertools.product((found.key, found.value), ("mean", "rotation")):
        every, past = (getattr(each, part) for each in (side.all_tokens, side.past_windows))
        assert np.abs(past - every).max() > 0.01


def test_means_equal_numpys(tiny, seen, tmp_path):
    calibration = made(tiny, tmp_path, "center").calibration
    for index, layer in enumerate(seen):
        received = layer.S.sum(1).reshape(K, G, -1).sum(1).T[..., None]
        in_page = rope(layer.k, -middles(TOKENS, TOKENS, 0))
        for side, x in ((calibration.key, in_page), (calibration.value, layer.v)):
            means = side.all_tokens.mean, side.past_windows.mean
            assert means[0] is not None and means[1] is not None
            assert side.all_tokens.rotation is None
            read = (x * received).sum(0) / received.sum(0)
            np.testing.assert_allclose(means[0][index], read, atol=1e-5)
            np.testing.assert_allclose(means[1][index], x.mean(0), atol=1e-5)


def test_hessian_rotation_equals_numpys(tiny, seen, tmp_path):
    calibration = made(tiny, tmp_path, "hessian", order=8).calibration
    rotation = calibration.key.all_tokens.rotation
    assert rotation is not None
    assert calibration.value.all_tokens.rotation is None
    blocks = np.kron(np.eye(2), scipy.linalg.hadamard(8) / np.sqrt(8))
    for index, layer in enumerate(seen):
        q = layer.q.reshape(-1, H)
        M = q.T @ q / len(q)
        M = M + 0.01 * np.trace(M) / H * np.eye(H)
        for head in range(K):
            check_eigenvectors(rotation[index, head] @ blocks.T, M)


@pytest.mark.parametrize(
    ("score", "combined"),
    [
        ("qk_avg", lambda q, k: (q + k) / 2),
        ("qk_max", np.maximum),
        ("qk_product", lambda q, k: q * k),
        ("k_only", lambda q, k: k),
        ("q_only", lambda q, k: q),
    ],
)
def test_block_widths_spend_bits_where_numpys_scores_are_high(
    tiny, seen, tmp_path, score, combined
):
    widths = made(tiny, tmp_path, "blockgtq", score=score).calibration.key.widths
    assert widths is not None
    for index, layer in enumerate(seen):
        for head in range(K):
            q = (layer.q[:, head * G : head * G + G].reshape(-1, 2, H // 2) ** 2).sum(1).mean(0)
            k = (layer.k[:, head].reshape(-1, 2, H // 2) ** 2).sum(1).mean(0)
            s = combined(q, k)
            found = widths[2, index, head].astype(int)
            assert found.sum() == 3 * H // 2
            assert (found[np.argsort(-s)] == np.sort(found)[::-1]).all()
            # No bit would be better spent elsewhere, within 1e-5 and the widths in use.
            gain, loss = s * 0.25**found, s * 0.25 ** (found - 1)
            may_gain, may_lose = found < found.max(), found > found.min()
            if may_gain.any() and may_lose.any():
                assert gain[may_gain].max() <= loss[may_lose].min() * (1 + 1e-5)


def test_ablations_change_what_they_name(tiny, seen, tmp_path):
    found = made(tiny, tmp_path, "oscar", key_target="k", value_target="v").calibration
    key_R, value_R = found.key.all_tokens.rotation, found.value.all_tokens.rotation
    assert key_R is not None and value_R is not None
    for index, layer in enumerate(seen):
        for head in range(K):
            k, v = layer.k[:, head], layer.v[:, head]
            for R, x in ((key_R, k), (value_R, v)):
                check_oscar(R[index, head].astype(np.float64), x.T @ x / len(x))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"method": "osar"}, "method 'osar' is not known: did you mean oscar"),
        ({"method": None}, "method 'None' is not known: known: jkvq, oscar"),
        ({"method": "kmeans", "centroids": 0}, "centroids=0: allowed: whole numbers from 1 to 655"),
        ({"method": "kmeans", "seed": -1}, "seed=-1: allowed: whole numbers from 0"),
        ({"method": "kmeans", "starts": True}, "starts=True: allowed"),
        ({"shared": "no"}, "shared='no': True or False"),
        ({"clip_for": 4}, "clip_for=4: a cache's name"),
        ({"method": "blockgtq", "score": "qk"}, "score=qk is not known: did you mean qk_"),
        ({"method": "oscar", "key_target": "z"}, "key_target=z is not known: known: q, sq, k"),
        ({"method": "oscar", "without": "hadamard"}, "without='hadamard': a list of eigenvectors"),
        (
            {"method": "oscar", "without": ("hadamrd",)},
            "without=hadamrd is not known: did you mean",
        ),
        ({"context": 8}, "context=8: allowed: whole numbers from 64 to 16777216"),
        ({"context": "8"}, "context='8': allowed: whole numbers from 64"),
        ({"window": 128.0}, "window=128.0: allowed: whole numbers"),
        ({"context": 2000}, "context=2000: give at most the model's, which is 1024"),
        ({"method": "kmeans", "centroids": 250}, "at least as many tokens"),
        ({"method": "hessian", "order": 5}, "order=5: it must divide the 16 channels"),
        ({"tokens": "many"}, "tokens='many': a whole number; some thousands are good"),
        ({"tokens": 0}, "tokens=0: a whole number"),
        ({"tokens": 15}, "tokens=15: at least 16 are needed"),
        ({"tokens": 999}, "999 tokens were asked for and the text has 300"),
        (
            {"method": "hessian", "clip_for": "oscar-int2"},
            "clip_for=oscar-int2: only with method jkvq or oscar, and the method is hessian; leave",
        ),
        ({"key_target": "k"}, "key_target=k: only with method oscar, and the method is jkvq"),
        ({"centroids": 4}, "centroids=4: only with method kmeans, and the method is jkvq"),
        ({"centroids": 256}, "centroids=256: only with method kmeans"),  # the default itself
        ({"method": "center", "shared": True}, "shared=True: only with method jkvq or oscar"),
        ({"dtype": "float32"}, "dtype='float32': the model is loaded already; leave it out"),
        (
            {"text": "prose " * 100},
            r"text='prose .* \[...\]: there is no such file; write",
        ),
        ({"text": 5}, "text=5: there is no such file"),
        ({"clip_for": "jkvq-int2"}, "does not clip; oscar-int2 does"),
        ({"colour": "red"}, "calibrate has no option 'colour'"),
        ({"self_written": True}, "a text and --self exclude each other"),
        ({"shared": True, "out": None}, "name its folder with out"),
    ],
)
def test_bad_options_are_refused_and_leave_nothing(tiny, tmp_path, monkeypatch, given, sentence):
    monkeypatch.setenv("JKVQ_CACHE", str(tmp_path / "user"))
    options = {"text": TEXT, "tokens": TOKENS, "out": tmp_path / "out", **given}
    with pytest.raises(jkvq.UserError, match=sentence):
        jkvq.calibrate(model_of(tiny), **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", [{}, {"text": None, "self_written": True}])
def test_a_model_of_weights_that_are_not_numbers_is_refused_before_it_reads(
    tiny, tmp_path, monkeypatch, given
):
    monkeypatch.setattr("jkvq.loading.calibrate.observe", None)
    for weight in (np.nan, np.inf):
        params = {**tiny.params, "norm": {"weight": jnp.full(CONFIG.width, weight)}}
        model = dataclasses.replace(model_of(tiny), params=params)
        options = {"text": TEXT, "tokens": TOKENS, "out": tmp_path / "out", **given}
        with pytest.raises(jkvq.UserError, match="tiny cannot be calibrated: some of its weights"):
            jkvq.calibrate(model, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_makes_no_numbers_of_a_text_is_refused(tmp_path):
    model = tiny_model()
    model.params["layers"][1]["attention"]["k_norm"]["weight"] *= 1e30
    with pytest.raises(jkvq.UserError, match="or what it makes of a text, are not numbers"):
        jkvq.calibrate(model, text=TEXT, tokens=TOKENS, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_self_written_text_is_the_same_each_time(tiny, tmp_path):
    made = [
        jkvq.calibrate(model_of(tiny), self_written=True, tokens=64, out=tmp_path / name).manifest
        for name in ("a", "b")
    ]
    assert made[0] == made[1]
    assert (made[0].corpus, made[0].tokens) == ("self", 64)


def test_the_default_text_is_prose_enough(tiny, tmp_path):
    manifest = jkvq.calibrate(model_of(tiny), tokens=64, out=tmp_path / "out").manifest
    assert manifest.corpus == "pydoc_data.topics"
    from jkvq.calibration.prose import default_text

    assert len(default_text()) > 100_000
    assert "::=" not in default_text()
