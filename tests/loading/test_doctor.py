import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jkvq.loading.doctor import diagnose

needs_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU is there and in use")


@pytest.fixture(autouse=True)
def user(tmp_path, monkeypatch) -> Path:
    """A user's cache, empty."""
    monkeypatch.setenv("JKVQ_CACHE", str(tmp_path / "user"))
    return tmp_path / "user"


def found() -> dict[tuple[str, str], tuple[str, str | None]]:
    return {(each.section, each.name): (each.value, each.advice) for each in diagnose()}


@pytest.fixture
def card(tmp_path, monkeypatch):
    """Lets ``nvidia-smi`` say something."""

    def say(line: str, code: int = 0) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{line}'\nexit {code}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return say


@needs_cpu
def test_a_machine_without_problems_has_none(smollm2_file, monkeypatch):
    monkeypatch.setenv("JKVQ_CACHE", str(smollm2_file.parents[1]))
    monkeypatch.setenv("JAX_TRACEBACK_FILTERING", "auto")
    report = found()
    assert {advice for _, advice in report.values()} == {None}
    assert report["versions", "jax"][0] == jax.__version__
    assert report["environment", "JAX_TRACEBACK_FILTERING"][0] == "auto"
    assert "there is none here" in report["devices", "GPU kernels"][0]
    choices = {name: value for (section, name), (value, _) in report.items() if "gen" in section}
    assert choices == {
        "dtype": "float32",
        "model": "smollm2-135m, 538 MB of weights",
        "cache": "jkvq-int4",
        "implementation": "reference",
    }


def test_a_model_that_is_not_there_is_not_fetched(user):
    report = found()
    assert report["jkvq generate", "model"][0] == "smollm2-135m, to be fetched (98.4 MB)"
    assert not user.exists()


@needs_cpu
def test_a_gpu_that_jax_does_not_use_is_a_problem(card, monkeypatch):
    card("NVIDIA H200, 140000, 143771, 9.0, 570.1")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    report = found()
    value, advice = report["devices", "GPU 0"]
    assert value.startswith("NVIDIA H200, compute capability 9.0, driver 570.1, 147 GB of 151 GB")
    assert advice is None
    assert "jkvq[cuda12]" in str(report["devices", "JAX cpu:0"][1])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "JAX_PLATFORMS=cpu keeps JAX from" in str(found()["devices", "JAX cpu:0"][1])


@pytest.mark.parametrize(
    ("line", "code", "name", "advice"),
    [
        ("Tesla T4, 100, 15360, 7.5, 550.1", 0, "GPU 0", "others use most of its memory"),
        ("NVIDIA-SMI has failed", 9, "NVIDIA driver", "see what `nvidia-smi` says"),
        ("NVIDIA GB10, [N/A], [N/A], 12.1, 580.1", 0, "GPU 0", "None"),
    ],
)
def test_what_the_driver_says_is_judged(card, line, code, name, advice):
    card(line, code)
    assert advice in str(found()["devices", name][1])


@needs_cpu
def test_a_gpu_without_bfloat16_gets_float16_and_plain_jax(monkeypatch):
    for module in ("models.dtype", "attention.implementation", "pallas_kernels.settings"):
        monkeypatch.setattr(f"jkvq.{module}.compute_capability", lambda: 7.5)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    report = found()
    assert "this one has 7.5" in report["devices", "GPU kernels"][0]
    assert report["jkvq generate", "dtype"][0] == "float16"
    assert report["jkvq generate", "implementation"][0] == "reference"


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder can be made in here")
    monkeypatch.setenv("JKVQ_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("JAX_DISABLE_JIT", "1")
    report = found()
    value, advice = report["folders", "cache"]
    assert "cannot be written: Not a directory" in value and "$JKVQ_CACHE" in str(advice)
    assert "unset it" in str(report["environment", "JAX_DISABLE_JIT"][1])


def test_a_broken_jax_is_a_line_of_the_report(tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("raise ImportError('no libcuda here')")
    code = "from jkvq.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    failed = [each for each in said["findings"] if each["name"] == "failed"]
    assert {each["section"] for each in failed} == {"devices", "jkvq generate"}
    assert {each["value"] for each in failed} == {"ImportError: no libcuda here"}
    assert all("JAX_PLATFORMS=cpu" in each["advice"] for each in failed)
    assert said["problems"] == 2
