"""Loading is safe by default: a cache that fits, calibrated on first use, and checked."""

import dataclasses
import json
import os
import re
import shutil
import sys
import time
import warnings
from pathlib import Path

import pytest

import jkvq
from jkvq.cache.specs.spec_text import parse_spec, spec_text
from jkvq.calibration.artefact import default_folder, load_artefact
from jkvq.cli.main import main
from jkvq.llm import with_cache
from jkvq.loading.calibrate import Corpus
from jkvq.loading.learn import state_file
from jkvq.loading.load import default_cache
from jkvq.models.formats.converted_folder import write_converted
from tests.tiny import CONFIG, biased_model, tiny_llm

LONG = [3, 5, 7] * 80  # a prompt of more tokens than stay exact
SHARP = 4.0  # random scores are so much alike that even a broken cache has a KL of 0.2


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch) -> Path:
    """A user's cache, empty."""
    folder = tmp_path / "user"
    folder.mkdir()
    monkeypatch.setenv("JKVQ_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def no_progress(monkeypatch):
    """No lines on how far a slow machine is."""
    monkeypatch.setattr("jkvq.support.progress._FIRST_LINE", 1e6)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model with a large key bias, which rotation alone cannot store."""
    folder = tmp_path_factory.mktemp("model") / "biased"
    llm = biased_model(300.0, SHARP)
    write_converted(folder, llm.config, llm.params, llm.tokenizer)
    return folder


@pytest.fixture(scope="module")
def first_use(model, tmp_path_factory) -> Path:
    """What a user's cache keeps when the model is loaded for the first time."""
    folder = tmp_path_factory.mktemp("user")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JKVQ_CACHE", str(folder))
        quietly(model)
    return folder


@pytest.fixture
def used(kept, first_use) -> Path:
    """A user's cache after the first use of the model."""
    shutil.copytree(first_use, kept, dirs_exist_ok=True)
    return kept


@pytest.fixture
def nothing_runs(monkeypatch):
    """Any calibration and any check is an error."""

    def fail(*_, **__):
        raise AssertionError("a text was read")

    monkeypatch.setattr(sys.modules["jkvq.loading.calibrate"], "observe", fail)
    monkeypatch.setattr(sys.modules["jkvq.loading.self_check"], "compare", fail)


def quietly(*arguments, **options) -> jkvq.LLM:
    with warnings.catch_warnings():
        warnings.simplefilter("error", jkvq.CacheWarning)
        return jkvq.load(*arguments, **options)


def checks(folder: Path) -> dict[str, float]:
    found = [json.loads(path.read_text()) for path in (folder / "checks").iterdir()]
    return {check["cache"]: check["kl"] for check in found}


def test_the_default_is_calibrated_and_checked_once(model, kept, request, capsys):
    llm = quietly(model)
    assert llm.spec == parse_spec("jkvq-int4")
    assert "First use of jkvq-int4 with" in capsys.readouterr().err
    manifest = load_artefact(default_folder(model, "jkvq")).manifest
    assert (manifest.corpus, manifest.tokens) == ("pydoc_data.topics", 2048)
    assert 0 < checks(kept)["jkvq-int4"] < 0.1

    request.getfixturevalue("nothing_runs")
    again = quietly(model)
    assert capsys.readouterr().err == ""
    options = {"max_new_tokens": 5, "temperature": 0.0}
    found, expected = (jkvq.generate(each, LONG, **options) for each in (again, llm))
    assert found.tokens == expected.tokens


def test_a_cache_that_breaks_the_model_is_named_with_one_that_works(model, used, request):
    sentence = r"^saw-int4 breaks this model: KL (\d\.\d); jkvq-int4 has (0\.\d+)$"
    with pytest.warns(jkvq.CacheWarning, match=sentence) as seen:
        llm = jkvq.load(model, cache="saw-int4")
    assert llm.spec == parse_spec("saw-int4")  # it is what the user asked for
    found = checks(used)
    assert found["saw-int4"] > 1
    said = str(seen[0].message)
    assert f"KL {found['saw-int4']:.2g};" in said
    assert f"has {found['jkvq-int4']:.2g}" in said
    assert seen[0].filename == __file__

    request.getfixturevalue("nothing_runs")  # but it warns again
    with pytest.warns(jkvq.CacheWarning) as seen:
        jkvq.load(model, cache="saw-int4")
    assert str(seen[0].message) == said


def test_nothing_is_checked_where_nobody_asks_or_nothing_is_packed(model, kept, nothing_runs):
    before = set(os.listdir(kept))
    quietly(model, cache="saw-int4", check=False)
    quietly(model, cache="bf16")
    quietly(model, cache="f32")
    quietly(model, cache="int2,sink=64,recent=960")  # the whole context stays in the windows
    assert set(os.listdir(kept)) == before


def test_a_default_that_breaks_the_model_gives_way_to_16_bits(model, used, monkeypatch):
    monkeypatch.setattr(sys.modules["jkvq.loading.self_check"], "BROKEN", 0.0)
    with pytest.warns(jkvq.CacheWarning, match=r"jkvq-int4 breaks .*; the cache is bf16 instead"):
        assert jkvq.load(model).spec == parse_spec("bf16")
    with pytest.warns(jkvq.CacheWarning, match=r"jkvq-int4 breaks .*; bf16 has 0$"):
        assert jkvq.load(model, cache="jkvq-int4").spec == parse_spec("jkvq-int4")


def test_models_that_cannot_have_the_default_get_another_and_hear_why(tmp_path):
    odd = dataclasses.replace(CONFIG, head_dim=24, rope_divisors=(1.0,) * 12)
    llm = tiny_llm(config=odd)
    write_converted(tmp_path / "odd", odd, llm.params, llm.tokenizer)
    sentence = (
        r"^the cache is saw-int4,center=true,recent=64,sink=64, not jkvq-int4: "
        r"head_dim=24: key rotation balanced needs a power of two$"
    )
    with pytest.warns(jkvq.CacheWarning, match=sentence):
        llm = jkvq.load(tmp_path / "odd", check=False)
    assert spec_text(llm.spec) == "saw-int4,center=true,recent=64,sink=64"
    assert load_artefact(default_folder(tmp_path / "odd", "center")).manifest.tokens == 2048
    unpackable = dataclasses.replace(CONFIG, head_dim=18, rope_divisors=(1.0,) * 9)
    assert spec_text(default_cache(unpackable)[0]) == "bf16"


def test_a_gpu_without_bfloat16_computes_in_float16_without_kernels(model, monkeypatch, capsys):
    for module in ("models.dtype", "attention.implementation", "pallas_kernels.settings"):
        monkeypatch.setattr(f"jkvq.{module}.compute_capability", lambda: 7.5)
    with monkeypatch.context() as patch:
        patch.setattr("jax.default_backend", lambda: "gpu")
        llm = quietly(model, cache="int4", check=False)
    assert llm.params["embedding"].dtype == "float16"
    assert llm.implementation == "reference"
    assert capsys.readouterr().err.count("has no bfloat16: computing in float16") == 1
    found = jkvq.generate(llm, LONG, max_new_tokens=5, temperature=0.0)
    wide = quietly(model, cache="int4", check=False, dtype="float32")
    expected = jkvq.generate(wide, LONG, max_new_tokens=5, temperature=0.0)
    assert found.tokens == expected.tokens


def test_new_weights_under_an_old_name_are_calibrated_beside_the_old_ones(tmp_path, request):
    def write(seed: int):
        llm = tiny_llm(seed=seed)
        write_converted(tmp_path / f"new{seed}", CONFIG, llm.params, llm.tokenizer)
        if (tmp_path / "model").exists():
            (tmp_path / "model").rename(tmp_path / "old")
        (tmp_path / f"new{seed}").rename(tmp_path / "model")

    write(0)
    folder = default_folder(tmp_path / "model", "jkvq")
    text = Corpus("letters", "abc" * 100)
    made = jkvq.calibrate(tmp_path / "model", text=text, tokens=300).manifest
    write(1)
    quietly(tmp_path / "model", check=False)
    assert load_artefact(folder).manifest == made  # which the user may not be able to make again
    (beside,) = folder.parent.glob("jkvq-*")
    assert load_artefact(beside).manifest.weights != made.weights
    with pytest.raises(jkvq.UserError, match="made for a model with weights"):
        jkvq.load(tmp_path / "model", calibration=folder)

    request.getfixturevalue("nothing_runs")
    quietly(tmp_path / "model", check=False)
    (tmp_path / "model").rename(tmp_path / "new")
    (tmp_path / "old").rename(tmp_path / "model")
    quietly(tmp_path / "model", check=False)


def test_a_load_in_another_dtype_replaces_no_calibration(model, used, request):
    """Weights in float16 are others than those in float32."""
    folder = default_folder(model, "jkvq")
    made = load_artefact(folder).manifest
    quietly(model, dtype="float16", check=False)
    assert load_artefact(folder).manifest == made
    request.getfixturevalue("nothing_runs")
    for dtype in ("float16", "float32"):
        quietly(model, dtype=dtype, check=False)
        jkvq.with_cache(jkvq.load_model(model, dtype=dtype), "jkvq-int4")


def _without_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _cut_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 7')


def _older(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 6}')


def _without_arrays(folder: Path) -> None:
    (folder / "arrays.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_without_manifest, r"holds no calibration \(it has no manifest.json\)"),
        (_cut_manifest, r"manifest.json is damaged \(.*\)"),
        (_older, "is a calibration of format 6, and this version reads 7"),
        (_without_arrays, r" is damaged \(its arrays are not those it was made with\)"),
    ],
)
def test_a_kept_calibration_that_cannot_be_read_is_made_again(
    model, used, request, capsys, damage, reason
):
    folder = default_folder(model, "jkvq")
    made, named = load_artefact(folder), used / "named"
    shutil.copytree(folder, named)
    for each in (folder, named):
        damage(each)
    quietly(model)
    said = capsys.readouterr().err
    assert said.startswith(str(folder)) and said.count("\n") == 1
    assert re.search(f"{reason}: calibrating on 2,048 tokens of ", said)
    assert load_artefact(folder).manifest == made.manifest
    with pytest.raises(jkvq.UserError, match=reason):
        quietly(model, calibration=named)  # what the user names is the user's

    request.getfixturevalue("nothing_runs")
    quietly(model)
    assert capsys.readouterr().err == ""


def test_drafts_of_killed_processes_are_swept_after_a_day(model, used):
    yesterday = time.time() - 25 * 3600
    calibrations = default_folder(model, "jkvq").parent
    drafts = [used / "models/.fetch-abc", calibrations / ".jkvq-abc", used / "checks/.abc"]
    for stale in drafts:
        fresh = stale.with_name(stale.name + "-fresh")
        for path in (stale, fresh):
            path.mkdir(parents=True)
            (path / "part").write_text("half")
        for path in (stale / "part", stale, fresh):  # something in it is fresh
            os.utime(path, (yesterday, yesterday))
    stay = [calibrations / ".jkvq.lock", state_file(default_folder(model, "jkvq"))]
    for path in stay:
        path.touch()
        os.utime(path, (yesterday, yesterday))
    quietly(model)
    assert [path for path in drafts if path.exists()] == []
    assert all(path.with_name(path.name + "-fresh").exists() for path in drafts)
    assert [path for path in stay if not path.exists()] == []


def test_centroids_are_not_made_on_first_use(model, monkeypatch):
    monkeypatch.setattr("jkvq.loading.load.read_model", None)  # refused before that
    with pytest.raises(jkvq.UserError, match="--method kmeans --centroids 16`"):
        jkvq.load(model, cache="kmeans16-int4")


def test_a_disk_that_takes_nothing_does_not_stop_a_load(model, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("no folder can be made in here")
    monkeypatch.setenv("JKVQ_CACHE", str(tmp_path / "file"))
    llm = quietly(model)
    assert llm.spec == parse_spec("jkvq-int4")
    said = capsys.readouterr().err
    assert "The calibration is for this run only: " in said
    assert "the check of jkvq-int4 could not be kept: " in said
    assert said.count("\n") == 3


def test_with_cache_and_load_agree(model, used):
    plain = jkvq.load_model(model)
    options = {"max_new_tokens": 5, "temperature": 1.0, "seed": 3}
    expected = jkvq.generate(with_cache(plain, "jkvq-int4"), LONG, **options)
    found = jkvq.generate(quietly(model), LONG, **options)
    assert found.tokens == expected.tokens


def test_the_command_line_prints_the_sentence(model, used, monkeypatch, capsys):
    def run(*options: str) -> list[str]:
        arguments = ["jkvq", "generate", "Hi", "--model", str(model), "-n", "2", *options]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        return capsys.readouterr().err.splitlines()

    monkeypatch.setattr("os._exit", sys.exit)
    warned, report = run("--cache", "saw-int4")
    assert re.fullmatch(r"jkvq: saw-int4 breaks this model: KL .*; jkvq-int4 has .*", warned)
    (report,) = run("--cache", "saw-int4", "--no-check")
    assert "; saw-int4; seed" in report
    (report,) = run()
    assert "; jkvq-int4; seed" in report
