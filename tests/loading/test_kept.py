"""A user's cache with something of every kind, whole and damaged."""

import dataclasses
import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from jkvq import UserError
from jkvq.calibration import artefact
from jkvq.loading.kept import KINDS, clear, fetch_model, list_kept
from jkvq.models.formats import catalog
from jkvq.models.formats.catalog import CATALOG, IndexUnavailable, NamedModel, cached_file
from jkvq.support.lock import lock_beside

MODEL = b"weights" * 100
CHECK = {"cache": "int4", "kl": 0.25, "tokens": 512, "scored": 511}
DAY = 24 * 3600


def write(path: Path, content: bytes | str = "", age: float = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def write_calibration(folder: Path, format: int) -> None:
    fields = {field.name: "" for field in dataclasses.fields(artefact.Manifest)}
    nothing = hashlib.sha256().hexdigest()
    write(folder / "arrays.safetensors")
    write(folder / "manifest.json", json.dumps({"format": format, "sha256": nothing, **fields}))


@pytest.fixture
def user(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "user"
    monkeypatch.setenv("JKVQ_CACHE", str(folder))
    sum_ = hashlib.sha256(MODEL).hexdigest()
    for name in ("small", "cut", "absent"):
        model = NamedModel((f"{name}==1",), ".bin", len(MODEL), sum_, f"nobody/{name}")
        monkeypatch.setitem(CATALOG, name, model)
    write(cached_file("small"), MODEL, age=3 * DAY)
    write(cached_file("cut"), MODEL[:-1])
    write(folder / "models" / "mine.gguf", "not ours to list or clear")
    write_calibration(folder / "calibrations/small/jkvq", artefact._FORMAT)
    write_calibration(folder / "calibrations/small/oscar", artefact._FORMAT - 1)
    write(folder / "checks/a.json", json.dumps(CHECK))
    write(folder / "checks/b.json", json.dumps(CHECK | {"kl": "abc"}))
    write(folder / "compiled/jit_step-0-cache", b"program")
    write(folder / "checks/.stale", "half", age=2 * DAY)
    write(folder / "checks/.fresh", "half")
    return folder


def test_every_kind_is_listed_with_its_damage(user):
    found = {(each.kind, each.name): each for each in list_kept()}
    problems = {name: each.problem for name, each in found.items()}
    assert problems == {
        ("models", "small"): None,
        ("models", "cut"): "699 of 700 bytes",
        ("calibrations", "small/jkvq"): None,
        ("calibrations", "small/oscar"): problems["calibrations", "small/oscar"],
        ("checks", "int4, KL 0.25"): None,
        ("checks", "b"): "it is damaged",
        ("compiled", "1 programs"): None,
        ("drafts", "checks/.stale"): "a killed process left it",
    }
    assert str(problems["calibrations", "small/oscar"]).startswith("is a calibration of format")
    assert found["models", "small"].bytes == len(MODEL)
    assert found["models", "small"].age == pytest.approx(3 * DAY, abs=60)
    assert {each.kind for each in list_kept(["checks", "drafts"])} == {"checks", "drafts"}


def test_an_empty_cache_lists_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("JKVQ_CACHE", str(tmp_path / "nowhere"))
    assert list_kept() == []


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_is_cleared_and_no_other(user, kind):
    before = list_kept()
    assert clear(list_kept([kind])) == []
    names = {(each.kind, each.name) for each in before if each.kind != kind}
    assert {(each.kind, each.name) for each in list_kept()} == names
    assert (user / "models" / "mine.gguf").exists()
    assert (user / "checks" / ".fresh").exists()
    assert (user / "compiled").is_dir()


def test_what_links_lead_to_stays(user, tmp_path):
    elsewhere = write(tmp_path / "elsewhere" / "jit_step-1-cache", b"program").parent
    for path in (user / "compiled").iterdir():
        path.unlink()
    (user / "compiled").rmdir()
    (user / "compiled").symlink_to(elsewhere)
    model = write(tmp_path / "small.gguf", MODEL)
    cached_file("small").unlink()
    cached_file("small").symlink_to(model)
    left = clear(list_kept(["models", "compiled"]))
    assert [(each.kind, reason) for each, reason in left] == [("compiled", "a link leads there")]
    assert (elsewhere / "jit_step-1-cache").exists()
    assert model.exists() and not cached_file("small").is_symlink()


def test_what_is_in_use_stays(user):
    folder = user / "calibrations/small/jkvq"
    kept = list_kept(["calibrations"])
    with lock_beside(folder):
        left = clear(kept)
    assert [(each.path, reason) for each, reason in left] == [
        (folder, "another process is using it")
    ]
    assert [each.path for each in list_kept(["calibrations"])] == [folder]


def test_a_model_is_fetched_unless_it_is_whole(user, monkeypatch):
    fetched = []

    def fetch(name: str, target: Path) -> None:
        fetched.append(name)
        target.write_bytes(MODEL)

    monkeypatch.setattr(catalog, "_fetch", fetch)
    write(cached_file("absent"), b"x" * len(MODEL))  # the right size, other bytes
    assert [fetch_model(name) for name in ("small", "cut", "absent")] == [False, True, True]
    assert fetched == ["cut", "absent"]
    with pytest.raises(UserError, match="'smal' is not in the catalogue: did you mean small"):
        fetch_model("smal")


def test_what_is_kept_stays_when_nothing_can_be_fetched(user, monkeypatch):
    def fail(*_):
        raise IndexUnavailable("no network")

    monkeypatch.setattr(catalog, "_fetch", fail)
    with pytest.raises(UserError, match=r"cut could not be fetched: .* said 'no network'"):
        fetch_model("cut")
    assert cached_file("cut").read_bytes() == MODEL[:-1]
