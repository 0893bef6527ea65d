"""What a comparison keeps, and what it measures again; what measures is replaced here."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jkvq
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.kept_names import keep_name
from jkvq.cli.compare import stages as under_test
from jkvq.cli.compare.stages import Stages
from jkvq.evaluation.fidelity import Fidelity
from jkvq.evaluation.perplexity import Score
from tests.made_up import random_calibration
from tests.tiny import CONFIG, tiny_model

TOKENS = list(range(40))
CALIBRATION = random_calibration(CacheShape.of(CONFIG))
OTHER = dataclasses.replace(CALIBRATION, key=CALIBRATION.value, value=CALIBRATION.key)


@pytest.fixture(scope="module")
def model():
    return tiny_model(config=dataclasses.replace(CONFIG, head_dim=64, rope_divisors=(1.0,) * 32))


@pytest.fixture
def made(model, tmp_path):
    """Two caches and a baseline, to be measured."""
    known = {"bf16": None, "jkvq-int4": CALIBRATION, "kivi-int2": None}
    return Stages(tmp_path / "out", model, ["bf16", "jkvq-int4"], known, None)


@pytest.fixture
def scored(monkeypatch):
    """The caches of each measurement of perplexity."""
    seen = []

    def compare_lengths(subjects, tokens, lengths, **others):
        seen.append(list(subjects))
        return {n: dict.fromkeys(subjects, Score(1.0, 0.0, 0.0, n, 4.0)) for n in lengths}

    monkeypatch.setattr(under_test, "subject", lambda *given, **others: given)
    monkeypatch.setattr(under_test, "compare_lengths", compare_lengths)
    return seen


def _score(stages: Stages, tokens: list[int] = TOKENS) -> None:
    assert list(stages.perplexity(tokens, [40], "t.txt")[40]) == list(stages.calibrations)


def test_what_is_measured_is_not_measured_again(made, scored, capsys):
    _score(made)
    _score(made)
    assert scored == [["bf16", "jkvq-int4", "kivi-int2"]]
    _score(dataclasses.replace(made, calibrations={**made.calibrations, "int4": None}))
    assert scored[1:] == [["bf16", "int4"]]
    assert capsys.readouterr().err == ""


def test_another_calibration_is_measured_again(made, scored, capsys):
    _score(made)
    again = dataclasses.replace(made, calibrations={**made.calibrations, "jkvq-int4": OTHER})
    _score(again)
    _score(again)
    assert scored[1:] == [["bf16", "jkvq-int4"]]
    said = "perplexity of jkvq-int4 is measured again, with another calibration\n"
    assert capsys.readouterr().err == said


def test_a_name_that_means_another_cache_is_measured_again(
    made, scored, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("JKVQ_CACHE", str(tmp_path))
    named = dataclasses.replace(made, calibrations={"bf16": None, "mine": None})
    keep_name("mine", "int4")
    _score(named)
    keep_name("mine", "int2")
    _score(named)
    assert scored[1:] == [["bf16", "mine"]]
    said = "perplexity of mine is measured again, with another spec\n"
    assert capsys.readouterr().err == said


def test_other_settings_are_refused(made, model, scored):
    def refused(by: str, stages: Stages, tokens: list[int] = TOKENS) -> None:
        with pytest.raises(jkvq.UserError, match=f"was measured with {by}, not .*: give the same"):
            _score(stages, tokens)

    _score(made)
    _score(dataclasses.replace(made, implementation="reference"))  # which None is here
    halved = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
    rounded, other = dataclasses.replace(model, params=halved), tiny_model(1, model.config)
    refused("dtype=float32", dataclasses.replace(made, model=rounded))
    refused("weights=[0-9a-f]{64}", dataclasses.replace(made, model=other))
    refused("implementation=reference", dataclasses.replace(made, implementation="interpret"))
    refused("tokens_sha256=[0-9a-f]{64}", made, TOKENS[::-1])
    assert len(scored) == 1


def test_the_picture_shows_all_that_is_asked_for(made, monkeypatch):
    measured, drawn = [], []

    def fidelity(model, tokens, caches):
        measured.append(list(caches))
        layers = [Fidelity(*[0.25 * (1 + layer)] * 9) for layer in range(2)]
        return dict.fromkeys(caches, layers)

    def figure(found, title):
        drawn.append({cache: [layer.output for layer in layers] for cache, layers in found.items()})

    monkeypatch.setattr(under_test, "reconstruction", lambda *given: given)
    monkeypatch.setattr(under_test, "fidelity", fidelity)
    monkeypatch.setattr(under_test, "fidelity_figure", figure)
    monkeypatch.setattr(under_test, "save_picture", lambda figure, place: None)
    made.fidelity(TOKENS, "t.txt")
    caches = [*made.caches, "kivi-int2"]
    found = dataclasses.replace(made, caches=caches).fidelity(TOKENS, "t.txt")
    assert measured == [made.caches, ["kivi-int2"]]
    assert drawn[1] == {cache: [0.25, 0.5] for cache in caches}
    assert {cache: means["output"] for cache, means in found.items()} == dict.fromkeys(
        caches, 0.375
    )


@pytest.mark.parametrize("text", ["", "[]", '{"model": "tiny", "tokens": [40], "caches": {}}'])
def test_a_file_of_another_kind_is_refused(made, scored, text):
    made.out.mkdir()
    (made.out / "perplexity.json").write_text(text)
    with pytest.raises(jkvq.UserError, match="is not ours, or an older version's: name another"):
        _score(made)
    assert scored == []
