import dataclasses
import json
import sys

import pytest

import jkvq
from jkvq.calibration.prose import default_text
from jkvq.evaluation.corpus import first_tokens
from jkvq.evaluation.perplexity import compare
from jkvq.evaluation.subjects import Cached
from jkvq.loading.self_check import BROKEN, Check, check_cache
from tests.tiny import tiny_model

CHECK = sys.modules["jkvq.loading.self_check"]


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("JKVQ_CACHE", str(tmp_path / "user"))
    return tmp_path / "user" / "checks"


@pytest.fixture(scope="module")
def plain() -> jkvq.Model:
    return tiny_model()


def test_tokens_are_scored_from_the_first_that_reads_a_packed_one(plain):
    llm = jkvq.with_cache(plain, "int2,sink=8,recent=64,page=8")
    found = check_cache(plain, llm, None)
    assert found is not None
    tokens = first_tokens(plain.tokenizer, default_text(), found.tokens)
    subjects = {"bf16": Cached(jkvq.with_cache(plain, "bf16")), "int2": Cached(llm)}

    def total(first: int) -> float:
        score = compare(subjects, tokens, reference="bf16", first=first)["int2"]
        return (score.kl or 0.0) * score.scored

    first = found.tokens - found.scored
    assert total(first) - total(first + 1) > 100 * (total(1) - total(first)) / first


def test_a_result_is_kept_for_model_cache_and_calibration(plain, kept, monkeypatch):
    runs = []

    def counted(*arguments, **options):
        runs.append(options["label"])
        return compare(*arguments, **options)

    monkeypatch.setattr(CHECK, "compare", counted)
    made = [
        jkvq.calibrate(plain, method="center", tokens=tokens, out=kept.parent / str(tokens))
        for tokens in (64, 128)
    ]

    def check(model: jkvq.Model, cache: str, calibration=None) -> Check | None:
        return check_cache(model, jkvq.with_cache(model, cache, calibration), calibration)

    found = [check(plain, "int4,center=true", each.calibration) for each in made]
    assert [(each.tokens, each.scored) for each in found if each] == [(384, 383)] * 2
    assert found[0] != found[1]
    assert check(plain, "int4,center=true", made[0].calibration) == found[0]
    other = tiny_model(seed=1)
    assert check(plain, "int4") != check(other, "int4")
    assert check(plain, "int4") is not None
    labels = ["int4,center=true"] * 2 + ["int4"] * 2
    assert runs == [f"Checking {label}" for label in labels]
    assert len(list(kept.iterdir())) == 4


def test_a_damaged_result_is_made_again(plain, kept, capsys):
    llm = jkvq.with_cache(plain, "int4")
    found = check_cache(plain, llm, None)
    (file,) = kept.iterdir()
    whole = json.loads(file.read_text())
    words = (json.dumps(whole | {"kl": kl}) for kl in ("abc", None, [0.1]))
    for damage in ("", "{", "[]", '{"cache": "int4"}', *words):
        file.write_text(damage)
        assert check_cache(plain, llm, None) == found
        assert f"{file} is damaged: checking int4 again\n" in capsys.readouterr().err
        assert json.loads(file.read_text()) == dataclasses.asdict(found)  # pyright: ignore


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interruption_leaves_nothing(plain, kept, monkeypatch, capsys, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(CHECK.json, "dump", fail)
    llm = jkvq.with_cache(plain, "int4")
    if isinstance(error, OSError):
        assert check_cache(plain, llm, None) is not None
        assert "cannot be written: No space left on device" in capsys.readouterr().err
    else:
        with pytest.raises(KeyboardInterrupt):
            check_cache(plain, llm, None)
    assert list(kept.iterdir()) == []


def test_a_check_that_costs_too_much_is_left_out_with_a_line(plain, kept, monkeypatch, capsys):
    long = dataclasses.replace(plain, config=dataclasses.replace(plain.config, context=32768))
    assert check_cache(long, jkvq.with_cache(long, "int4,recent=4032"), None) is None
    assert "int4,recent=4032 was not checked: behind its windows" in capsys.readouterr().err
    monkeypatch.setattr(CHECK, "free_bytes", lambda: 1000)
    assert check_cache(plain, jkvq.with_cache(plain, "int4"), None) is None
    assert "int4 was not checked: that takes" in capsys.readouterr().err
    assert not kept.exists()


def test_what_is_not_a_number_is_broken():
    assert Check("int4", float("nan"), 512, 511).broken
    assert not Check("int4", BROKEN, 512, 511).broken
