import dataclasses
import filecmp
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jkvq
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.calibration.artefact import (
    _SHIPPED,
    default_folder,
    find_artefact,
    load_artefact,
    save_artefact,
)
from jkvq.loading.calibrate import Corpus
from jkvq.loading.load import calibration_for
from jkvq.models.fingerprint import fingerprint
from jkvq.models.formats.catalog import CATALOG
from tests.tiny import model_of, tiny_model

TEXT = Corpus("fox", "The quick brown fox jumps over the lazy dog. " * 5)


def make(llm, out, method="jkvq", **options):
    return jkvq.calibrate(model_of(llm), method=method, text=TEXT, tokens=200, out=out, **options)


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "jkvq"
    make(tiny, folder)
    return folder


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("JKVQ_CACHE", str(tmp_path / "user"))


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("method", ["jkvq", "blockgtq", "kmeans"])
def test_an_artefact_is_read_as_it_was_written(tiny, tmp_path, method):
    artefact = make(
        tiny, tmp_path / "a", method, **({"centroids": 8} if method == "kmeans" else {})
    )
    read = load_artefact(tmp_path / "a")
    assert read.manifest == artefact.manifest
    assert (read.calibration.method, read.calibration.weights) == (
        artefact.calibration.method,
        artefact.calibration.weights,
    )
    for name in ("key", "value"):
        wanted, found = (
            dataclasses.asdict(getattr(each.calibration, name)) for each in (artefact, read)
        )
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert (manifest["corpus"], manifest["tokens"]) == ("fox", 200)
    assert set(manifest["versions"]) == {"jkvq", "jax", "numpy", "python"}


def test_two_runs_give_the_same_bytes_apart_from_the_time(tiny, made, tmp_path):
    make(tiny, tmp_path / "again")
    assert files(made) == files(tmp_path / "again")
    _, different, errors = filecmp.cmpfiles(made, tmp_path / "again", files(made), shallow=False)
    assert (set(different) <= {"manifest.json"}, errors) == (True, [])
    first, second = (
        json.loads((folder / "manifest.json").read_text()) for folder in (made, tmp_path / "again")
    )
    del first["created"], second["created"]
    assert first == second


def test_an_artefact_serves_several_caches(tiny, made):
    key = load_artefact(made).calibration.key
    for cache, mean, rotation in (
        ("jkvq-int3", key.past_windows.mean, key.past_windows.rotation),
        ("jkvq-int4,sink=0,recent=0", key.all_tokens.mean, key.all_tokens.rotation),
    ):
        basis = jkvq.with_cache(model_of(tiny), cache, made).basis.key
        np.testing.assert_array_equal(basis.mean, mean)
        # The directions are the artefact's, mixed, and scaled by a power of two.
        assert basis.matrices is not None
        both = (np.asarray(R, np.float64) for R in (basis.matrices.rotation, rotation))
        found, wanted = (R @ R.swapaxes(-1, -2) for R in both)
        scale = np.trace(found, axis1=-2, axis2=-1) / np.trace(wanted, axis1=-2, axis2=-1)
        np.testing.assert_allclose(np.log2(scale), np.round(np.log2(scale)), atol=1e-5)
        wanted = wanted * scale[..., None, None]
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
    basis = jkvq.with_cache(model_of(tiny), "int4,center=true", made).basis.key
    np.testing.assert_array_equal(basis.mean, key.all_tokens.mean)
    assert basis.matrices is None


def test_the_artefact_of_other_weights_is_refused(made):
    with pytest.raises(jkvq.UserError, match=r"made for a model with weights .* calibrate it with"):
        jkvq.with_cache(tiny_model(seed=1), "jkvq-int4", made)


@pytest.mark.parametrize(
    ("cache", "sentence"),
    [
        ("oscar-int2", r"rotation oscar, and .* jkvq: .*calibrate .*--method oscar"),
        ("hessian-int4", r"rotation hessian, and .* jkvq: .*calibrate .*--method hessian"),
        ("kmeans16-int4", r"centroids of the keys: .*--method kmeans --centroids 16"),
        ("blockgtq-k3v3", r"widths of the keys: .*--method blockgtq"),
    ],
)
def test_a_cache_that_an_artefact_does_not_serve_is_refused(tiny, made, cache, sentence):
    with pytest.raises(jkvq.UserError, match=sentence):
        jkvq.with_cache(model_of(tiny), cache, made)


def test_a_missing_calibration_names_the_command(tiny, tmp_path):
    with pytest.raises(jkvq.UserError, match="`jkvq calibrate --model tiny --method jkvq`"):
        jkvq.with_cache(model_of(tiny), "jkvq-int4")
    with pytest.raises(jkvq.UserError, match="holds no calibration"):
        jkvq.with_cache(model_of(tiny), "jkvq-int4", tmp_path / "nowhere")


def test_a_kept_artefact_is_found_and_replaced(tiny, made):
    jkvq.calibrate(model_of(tiny), text=TEXT, tokens=100)
    folder = default_folder("tiny", "jkvq")
    assert load_artefact(folder).manifest.tokens == 100
    assert jkvq.with_cache(model_of(tiny), "jkvq-int2").basis.key.matrices is not None
    jkvq.calibrate(model_of(tiny), text=TEXT, tokens=200)
    assert load_artefact(folder).manifest.tokens == 200
    assert files(folder) == files(made)
    assert sorted(os.listdir(folder.parent)) == [".jkvq.lock", "jkvq"]


@pytest.mark.parametrize(
    ("manifest", "sentence"),
    [
        ('{"format": 6}', "format 6, and this version reads 7; calibrate again"),
        ('{"format": 7', "damaged"),
        (None, "holds no calibration"),
    ],
)
def test_a_kept_artefact_that_cannot_be_read_is_replaced(tiny, manifest, sentence):
    jkvq.calibrate(model_of(tiny), text=TEXT, tokens=100)
    folder = default_folder("tiny", "jkvq")
    (folder / "manifest.json").unlink()
    if manifest is not None:
        (folder / "manifest.json").write_text(manifest)
    assert find_artefact("tiny", parse_spec("jkvq-int2")) == folder
    with pytest.raises(jkvq.UserError, match=sentence):
        jkvq.with_cache(model_of(tiny), "jkvq-int2")
    jkvq.calibrate(model_of(tiny), text=TEXT, tokens=200)
    assert load_artefact(folder).manifest.tokens == 200


def test_a_damaged_artefact_is_refused(tiny, made, tmp_path):
    def damaged(name: str, change) -> Path:
        folder = tmp_path / name
        save_artefact(load_artefact(made), folder)
        change(folder)
        return folder

    def flip(folder: Path):
        data = bytearray((folder / "arrays.safetensors").read_bytes())
        data[-5] ^= 1
        (folder / "arrays.safetensors").write_bytes(data)

    def cut(folder: Path):
        (folder / "manifest.json").write_text('{"format": 7')

    def older(folder: Path):
        (folder / "manifest.json").write_text('{"format": 6}')

    def lacking(folder: Path):
        (folder / "arrays.safetensors").unlink()

    for name, change, sentence in (
        ("flip", flip, "its arrays are not those it was made with"),
        ("cut", cut, "manifest.json is damaged"),
        ("older", older, "format 6, and this version reads 7; calibrate again"),
        ("lacking", lacking, "is damaged"),
    ):
        with pytest.raises(jkvq.UserError, match=sentence):
            load_artefact(damaged(name, change))


@pytest.mark.parametrize("where", ["arrays", "manifest"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interruption_leaves_nothing(made, tmp_path, monkeypatch, where, error):
    artefact = load_artefact(made)

    def fail(*_, **__):
        raise error

    target = "_write" if where == "arrays" else "json.dumps"
    monkeypatch.setattr(f"jkvq.calibration.artefact.{target}", fail)
    kind = jkvq.UserError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(kind) as caught:
        save_artefact(artefact, tmp_path / "out")
    if kind is jkvq.UserError:
        assert "out cannot be written: No space left on device" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_refused_before_anything_is_written(made, tmp_path, monkeypatch):
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: full)
    with pytest.raises(jkvq.UserError, match=r"it takes [0-9.]+ KB, and 1 KB are free there"):
        save_artefact(load_artefact(made), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_not_overwritten(tiny, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(jkvq.UserError, match="exists and is not empty"):
        make(tiny, tmp_path)
    assert files(tmp_path) == ["notes.txt"]


def test_what_ships_is_for_the_weights_of_the_default_model(smollm2):
    folder = find_artefact("SmolLM2-135M", parse_spec("jkvq-int4"))
    assert folder is not None
    shipped = load_artefact(folder)
    assert shipped.manifest.weights == fingerprint(smollm2.config, smollm2.params)
    assert shipped.calibration.key.all_tokens.rotation.dtype == np.float32  # pyright: ignore
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4e6


def test_what_ships_is_whole_and_of_models_in_the_catalogue():
    folders = sorted(_SHIPPED.glob("*/*"))
    assert {folder.parent.name for folder in folders} == {"smollm2-135m", "qwen2.5-coder-1.5b"}
    for folder in folders:
        manifest = load_artefact(folder).manifest
        assert manifest.model == folder.parent.name and manifest.model in CATALOG
        assert manifest.method == folder.name and manifest.learned is not None
        assert find_artefact(manifest.model, parse_spec("jkvq-int2")) == folder


def test_what_is_kept_comes_before_what_ships_and_other_weights_before_neither(
    tiny, made, tmp_path, monkeypatch
):
    spec, again = parse_spec("jkvq-int4"), jkvq.Calibration(method="jkvq")
    first_use = SimpleNamespace(calibration=again)
    monkeypatch.setattr("jkvq.calibration.artefact.CATALOG", {"tiny": None})
    monkeypatch.setattr("jkvq.calibration.artefact._SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(
        "jkvq.loading.kept_calibration.calibrate_on_first_use", lambda *_: first_use
    )
    assert calibration_for(model_of(tiny), spec, None) is again
    shutil.copytree(made, tmp_path / "shipped" / "tiny" / "jkvq")
    found = calibration_for(model_of(tiny), spec, None)
    assert found is not None and found.weights == fingerprint(tiny.config, tiny.params)
    other = jax.tree.map(lambda x: x * 2, tiny.params)
    assert calibration_for(dataclasses.replace(model_of(tiny), params=other), spec, None) is again
    jkvq.calibrate(model_of(tiny), text=TEXT, tokens=150)
    assert find_artefact("tiny", spec) == default_folder("tiny", "jkvq")
    assert load_artefact(default_folder("tiny", "jkvq")).manifest.tokens == 150
