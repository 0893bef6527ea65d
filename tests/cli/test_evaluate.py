"""`jkvq eval` inside this process; tests/test_cli.py runs it as a user does."""

import json

import pytest
from typer.testing import CliRunner

import jkvq
from jkvq.cli.evaluate import evaluation
from jkvq.models.formats.converted_folder import write_converted
from tests.tiny import CONFIG


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_converted(path, CONFIG, tiny.params, tiny.tokenizer)
    return str(path)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"The fox jumps over {i} lazy dogs." for i in range(300)))
    return str(path)


def _run(*arguments: str) -> str:
    found = CliRunner().invoke(evaluation, arguments)
    if found.exception is not None:
        raise found.exception
    return found.stdout


def test_ppl_takes_baselines_and_windows(model, text):
    common = ("ppl", "--model", model, "--text", text, "--tokens", "400", "--cache")
    found = json.loads(_run(*common, "kivi-int2,int4", "--context", "200", "--json"))
    assert list(found["results"]) == ["bf16", "kivi-int2", "int4"]
    assert {score["scored"] for score in found["results"].values()} == {399}
    # 128 keys at 2 + 32/32 bits, 72 values at 2 + 32/16, and two buffers of 128.
    expected = (128 * 3 + 72 * 4 + 256 * 16) / 400
    assert found["results"]["kivi-int2"]["bits_per_element"] == pytest.approx(expected)
    table = _run(*common, "kivi-int2", "--context", "200", "--stride", "200")
    assert "windows of 200 every 200" in table
    assert f"{found['results']['kivi-int2']['ppl']:,.3f}" in table


def test_fidelity_prints_a_table_or_json_and_draws(model, text, tmp_path):
    common = (
        "fidelity",
        "--model",
        model,
        "--text",
        text,
        "--tokens",
        "60",
        "--cache",
        "int4,int2",
    )
    plot = tmp_path / "fidelity.png"
    layers = json.loads(_run(*common, "--plot", str(plot), "--json"))["layers"]
    assert {name: len(each) for name, each in layers.items()} == {"int4": 2, "int2": 2}
    for int4, int2 in zip(layers["int4"], layers["int2"], strict=True):
        assert int2.pop("top10") < int4.pop("top10")
        assert all(int2[measure] > 4 * int4[measure] for measure in int4 if measure != "hidden")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert f"{layers['int4'][1]['score']:.3g}" in _run(*common, "--layers")


def test_niah_scores_and_draws(model, text, tmp_path):
    plot = tmp_path / "niah.png"
    common = ("niah", "--model", model, "--haystack", text, "--length", "200,300", "--depth", "50")
    chosen = ("--trials", "1", "--task", "single", "--plot", str(plot))
    cells = json.loads(_run(*common, *chosen, "--json"))["cells"]["bf16"]
    found = [tuple(cell.values()) for cell in cells]
    assert found == [("single", 200, 0.5, 0), ("single", 300, 0.5, 0)]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["niah", "--cache", "bf16,kitty-int2"], "cache 'kitty-int2' exists in `jkvq eval ppl`"),
        (["niah", "--length", "1k"], "length=1k: whole numbers with commas between"),
        (["niah", "--plot", "x.pdf"], "a picture is written as PNG"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(text, arguments, sentence):
    with pytest.raises(jkvq.UserError, match=sentence):
        _run(*arguments, "--haystack", text, "--model", "no-such-model")
