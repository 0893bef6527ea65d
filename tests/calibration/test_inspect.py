"""What `jkvq calibrate` and `jkvq inspect` say and draw."""

import json
import struct
from pathlib import Path

import pytest
from typer.testing import CliRunner

import jkvq
from jkvq.cli.main import app
from jkvq.models.formats.converted_folder import write_converted
from tests.tiny import CONFIG


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_converted(path, CONFIG, tiny.params, tiny.tokenizer)
    return str(path)


def _jkvq(*arguments) -> str:
    """What a command prints; raises what it raises."""
    done = CliRunner().invoke(app, list(map(str, arguments)))
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_calibrate_then_inspect_and_generate(model, tmp_path):
    text, out, png = tmp_path / "text.txt", tmp_path / "out", tmp_path / "seen.png"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 5)
    given = ("--model", model, "--method", "jkvq", "--text", text, "--tokens", 200, "--out", out)
    found = json.loads(_jkvq("calibrate", *given, "--json"))
    assert (found["out"], found["method"], found["tokens"]) == (str(out), "jkvq", 200)
    with pytest.raises(jkvq.UserError, match="exists and is not empty"):
        _jkvq("calibrate", *given)

    seen = _jkvq("inspect", out, "--plot", png)
    assert "200 tokens of text.txt" in seen
    assert "jkvq-int2" in seen
    assert "after it, on average" in seen
    assert "the first 64 and the 256 most recent tokens, and pages of 64" in seen
    manifest = json.loads(_jkvq("inspect", out, "--json"))
    assert manifest["windows"] == {"sink": 64, "recent": 256, "page": 64}
    header = png.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(struct.unpack(">II", header[16:])) > 400

    written = _jkvq(
        *("generate", "Hi", "--model", model, "--cache", "jkvq-int4,page=8", "-n", 3),
        *("--calibration", out, "--no-check", "--json"),
    )
    assert json.loads(written)["cache"] == "jkvq-int4,page=8"


@pytest.mark.parametrize("model", ["smollm2-135m", "qwen2.5-coder-1.5b"])
def test_what_ships_is_explained(model):
    shipped = Path(__file__).parents[2] / "calibration" / "shipped" / model / "jkvq"
    seen = _jkvq("inspect", shipped)
    assert f"Calibration of {model} " in seen
    assert "Learned for jkvq-int2" in seen
    assert ("going on from another: KL" in seen) == ("learn_from" in seen)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (("center",), "--cache saw-int4,center=true,recent=64,sink=64 --calibration"),
        (("blockgtq",), "--cache blockgtq-k3v3 --calibration"),
        (("kmeans", "--centroids", 3), None),  # no preset has so many
    ],
)
def test_calibrate_says_how_to_use_it(method, said, model, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 5)
    given = ("--model", model, "--text", text, "--tokens", 64, "--out", out)
    printed = _jkvq("calibrate", "--method", *method, *given)
    assert f"64 tokens of text.txt -> {out}" in printed.replace("\n", " ")
    assert said in printed.replace("\n", " ") if said else "Use it" not in printed
    if not said:
        assert "as kmeans16-int4,centroids=3." in _jkvq("inspect", out)


def test_bad_input_is_refused(model, tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for arguments, sentence in (
        (("calibrate", "--model", model, "--text", binary), "cannot be read as UTF-8 text"),
        (("inspect", tmp_path), "holds no calibration"),
        (("generate", "Hi", "--model", model, "--cache", "kmeans16-int4"), "--centroids 16`"),
    ):
        with pytest.raises(jkvq.UserError, match=sentence):
            _jkvq(*arguments)
