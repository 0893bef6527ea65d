import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkvq
from jkvq.calibration.artefact import calibration_digest, save_artefact
from jkvq.calibration.learning import cost, learn
from jkvq.calibration.learning.parameters import Learned
from jkvq.calibration.learning.passes import Network
from jkvq.evaluation.perplexity import compare
from jkvq.evaluation.subjects import Cached
from jkvq.loading.calibrate import Corpus
from tests.calibration.learning.example import CACHE, CALIBRATED_TOKENS, TEXT, model

HOW = {"text": TEXT, "tokens": CALIBRATED_TOKENS, "window": 96, "context": 128}
SHORT = Corpus("short", TEXT.text[:180])
LEARNING = {"learn_for": CACHE, "steps": 12, "batch": 4, "rate": 0.006}


@pytest.fixture(scope="module")
def often():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learn, "CHECK_EVERY", 4)
        yield


@pytest.fixture(scope="module")
def learned(tmp_path_factory, often):
    place = tmp_path_factory.mktemp("learned") / "artefact"
    return jkvq.calibrate(model(), out=place, **HOW, **LEARNING), place


def test_the_kl_falls_below_that_of_the_start(learned, tmp_path):
    """On tokens that nothing was learned from, of the model over its cache."""
    made, place = learned
    assert made.manifest.learned["kl"] < 0.9 * made.manifest.learned["start_kl"]
    start = jkvq.calibrate(model(), out=tmp_path / "start", **HOW)
    own = model()
    caches = {"": jkvq.with_cache(own, "f32,page=16")}
    for name, calibration in (("start", start.calibration), ("learned", place)):
        caches[name] = jkvq.with_cache(own, CACHE, calibration)
    tokens = own.tokenizer.encode(TEXT.text)[-288:]
    subjects = {name: Cached(llm) for name, llm in caches.items()}
    scores = compare(subjects, tokens, reference="", context=96)
    before, after = scores["start"].kl, scores["learned"].kl
    assert before is not None
    assert after is not None
    assert after < 0.9 * before


def test_the_artefact_is_like_any_other(learned):
    made, place = learned
    read = jkvq.load_artefact(place)
    assert read.manifest == made.manifest
    assert read.manifest.options["learn_for"] == CACHE
    assert calibration_digest(read.calibration) == calibration_digest(made.calibration)
    for cache in (CACHE, "jkvq-int4,page=16", "jkvq-int3,recent=0,sink=0"):
        jkvq.with_cache(model(), cache, place)


def test_learning_goes_on_from_what_was_learned(learned, tmp_path, monkeypatch):
    """From the KL that it has, and without reading the text for a start."""
    made, place = learned[0], tmp_path / "start"
    manifest = dataclasses.replace(made.manifest, caches={"narrow": CACHE})
    save_artefact(dataclasses.replace(made, manifest=manifest), place)
    monkeypatch.setattr("jkvq.calibration.observe._observe_sequence", None)
    again = jkvq.calibrate(model(), out=tmp_path / "out", learn_from=place, **HOW, **LEARNING)
    before, after = made.manifest.learned, again.manifest.learned
    np.testing.assert_allclose(after["start_kl"], before["kl"], rtol=1e-3)
    assert after["kl"] < after["start_kl"]
    assert again.manifest.options["learn_from"] == calibration_digest(made.calibration)
    assert again.manifest.caches == {"narrow": CACHE}
    jkvq.with_cache(model(), CACHE, tmp_path / "out")


def test_a_killed_run_goes_on_and_ends_as_if_it_had_not_been(learned, tmp_path, monkeypatch):
    steps = []

    class Killed(Exception):
        pass

    def until_the_sixth(self, layers, windows, typical, wrapped=Network.kl_and_gradient):
        steps.append(windows)
        if len(steps) == 6:
            raise Killed
        return wrapped(self, layers, windows, typical)

    monkeypatch.setattr(Network, "kl_and_gradient", until_the_sixth)
    with pytest.raises(Killed):
        jkvq.calibrate(model(), out=tmp_path / "out", **HOW, **LEARNING)
    assert not (tmp_path / "out").exists()
    made = jkvq.calibrate(model(), out=tmp_path / "out", **HOW, **LEARNING)
    assert len(steps) == 6 + 12 - 4
    assert calibration_digest(made.calibration) == calibration_digest(learned[0].calibration)
    assert made.manifest == learned[0].manifest
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("astray", ["is not a number", "after step 8 the KL is"])
def test_what_goes_astray_ends_with_the_best_so_far(astray, tmp_path, monkeypatch, capsys, often):
    """A KL of NaN in the sixth step, or one that has grown at the check after the eighth."""
    steps = []

    def spoiled(self, layers, windows, typical, wrapped=Network.kl_and_gradient):
        kl, gradient = wrapped(self, layers, windows, typical)
        steps.append(kl)
        if len(steps) < 6:
            return kl, gradient
        return (kl * np.nan if "number" in astray else kl), gradient

    def grown(self, learned, wrapped=learn._Run.checked):
        return wrapped(self, learned) * (1 if len(steps) < 6 else 100)

    monkeypatch.setattr(Network, "kl_and_gradient", spoiled)
    monkeypatch.setattr(learn._Run, "checked", grown)
    monkeypatch.setattr(learn, "_HALVINGS", 0)
    made = jkvq.calibrate(model(), out=tmp_path / "out", **HOW, **LEARNING)
    assert astray in capsys.readouterr().err
    assert len(steps) == (6 if "number" in astray else 8)
    assert made.manifest.learned["step"] == 4
    jkvq.with_cache(model(), CACHE, tmp_path / "out")


def test_what_is_much_worse_than_the_start_goes_back_at_half_the_rate(tmp_path, capsys, often):
    """A rate at which every step does harm, until it has been halved often enough."""
    how = {**LEARNING, "steps": 20, "rate": 32 * LEARNING["rate"]}
    made = jkvq.calibrate(model(), out=tmp_path / "out", **HOW, **how)
    said = capsys.readouterr().err
    assert "Going on from step 0 at half the rate: after step 4 the KL is" in said
    assert "Stopped" not in said
    assert made.manifest.learned["kl"] < made.manifest.learned["start_kl"]


@pytest.mark.parametrize(("head_dim", "part"), [(16, 1), (64, 0.25), (128, 0.125)])
def test_angles_of_wide_heads_move_less_than_means_and_stretches(head_dim, part):
    matrix, vector = np.ones((1, 1, head_dim, head_dim)), np.ones((1, 1, head_dim))
    gradient: Any = {"key": Learned(*(jnp.asarray(x) for x in (matrix, vector, matrix, vector)))}
    rule = learn._adam(0.02, 100, head_dim)
    state = rule.init(gradient)
    with jax.numpy_dtype_promotion("standard"):  # as Optax has it
        _, state = rule.update(gradient, state)  # the first has a rate of 0
        changes: Any = rule.update(gradient, state)[0]
    before, stretch, behind, mean = (np.asarray(x) for x in changes["key"])
    assert (mean < 0).all()
    np.testing.assert_array_equal(mean, stretch)
    for angles in (before, behind):
        np.testing.assert_allclose(angles, part * mean[0, 0, 0] * matrix, rtol=1e-6)


def test_hours_on_a_cpu_are_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "_rate", lambda: 1e3)
    monkeypatch.setattr("jkvq.calibration.observe._observe_sequence", None)
    with pytest.raises(jkvq.UserError, match=r"12 steps of 4 windows would take about \d+ days?,"):
        jkvq.calibrate(model(), out=tmp_path / "out", **HOW, **LEARNING)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"learn_for": "oscar-int2"}, "learn_for=oscar-int2: only caches with balanced rotations"),
        ({"learn_for": CACHE, "method": "oscar"}, "learn_for=.*: only with method jkvq"),
        ({"steps": 3}, "steps=3: only where something is learned; leave it out"),
        ({"learn_for": "jkvq-int2"}, r"window=96: a cache that keeps 64 \+ 256 .* at least 384"),
        (
            {"learn_for": CACHE, "text": SHORT, "tokens": 128},
            "the text has 180 tokens, and learning needs two",
        ),
        ({"learn_for": CACHE, "rate": 0}, "rate=0: allowed: numbers from 0.000001 to 1"),
        ({"learn_from": "x"}, "learn_from='x': only where something is learned; leave it out"),
        ({"learn_for": CACHE, "learn_from": "/no"}, "/no holds no calibration"),
        (
            {"learn_for": CACHE, "learn_from": "/no", "shared": True},
            "shared=True: learn_from has the start already; leave one of them out",
        ),
    ],
)
def test_what_cannot_be_learned_is_refused(options, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr("jkvq.calibration.observe._observe_sequence", None)
    with pytest.raises(jkvq.UserError, match=sentence):
        jkvq.calibrate(model(), out=tmp_path / "out", **HOW | options)


def test_all_windows_are_read_in_turn_and_those_held_out_never():
    from jkvq.calibration.learning.text import cut

    spec = jkvq.parse_spec(CACHE)
    how = {"window": 64, "context": 1024, "leading": 1, "batch": 3, "seed": 1}
    text = cut(list(range(1000)), spec, **how)
    assert text.windows.shape == (13, 64)
    assert (text.windows[:, 0] == 0).all()
    both = np.concatenate([text.windows, text.held_out])[:, 1:]
    assert both.ravel().tolist() == list(range(1, 1 + 15 * 63))
    read = np.concatenate([text.batch_of(step).tokens[:, 1] for step in range(13)])
    for turn in (read[:13], read[13:26], read[26:]):
        assert sorted(turn) == sorted(text.windows[:, 1])
    assert (read[:13] != read[13:26]).any()
    again = dataclasses.replace(text, seed=2)
    assert (text.batch_of(0).tokens != again.batch_of(0).tokens).any()
