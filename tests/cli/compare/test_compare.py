import dataclasses
import json

import pytest

import jkvq
from jkvq.models.formats.converted_folder import write_converted
from tests.cli.running import run, run_json
from tests.tiny import CONFIG


@pytest.fixture(scope="module")
def short_model(tiny, tmp_path_factory):
    """A tiny model whose answers soon fill its context."""
    path = tmp_path_factory.mktemp("model") / "short"
    config = dataclasses.replace(CONFIG, context=256)
    write_converted(path, config, tiny.params, tiny.tokenizer)
    return str(path)


@pytest.fixture
def sums(tmp_path):
    lines = [{"question": f"{n} and {n}?", "answer": f"#### {2 * n}"} for n in range(2)]
    (tmp_path / "gsm8k_test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_one_folder_holds_what_the_single_commands_say(short_model, text, sums, tmp_path):
    out = tmp_path / "out"
    common = ("--model", short_model, "--text", text, "--tokens", "240")
    chosen = ("--tasks", "gsm8k", "--data", str(sums), "--requests", "2", "--out", str(out))
    run("compare", *common, "--caches", "bf16", *chosen)
    kept = {path: path.read_bytes() for path in out.glob("*.json")}
    assert {path.stem for path in kept} == {"perplexity", "fidelity", "speed"}
    run("compare", *common, "--caches", "bf16", *chosen)
    assert {path: path.read_bytes() for path in out.glob("*.json")} == kept
    # A cache that is added is measured; the others stay as they are.
    wider = "--also", "kivi-int2", "--windows", "none,8+16"
    printed = run("compare", *common, "--caches", "int4", *wider, *chosen)
    speeds = json.loads((out / "speed.json").read_text())["caches"]
    assert list(speeds) == ["bf16", "int4"]
    assert speeds["bf16"] == json.loads(kept[out / "speed.json"])["caches"]["bf16"]
    lines = (out / "report.md").read_text().splitlines()
    asked = ("--cache", "int4,kivi-int2", "--windows", "none,8+16")
    ppl = run_json("eval", "ppl", *common, *asked)["results"]["240"]
    assert list(ppl) == ["bf16", "int4", "int4,sink=8,recent=16", "kivi-int2"]
    for cache in ("bf16", "int4"):
        row = next(line for line in lines if line.startswith(f"| {cache} |"))
        assert f"| {ppl[cache]['ppl']:,.3f} | {ppl[cache]['kl']:.4f} |" in row
        assert cache in printed
    bits = {
        cache: f"{each['bits_per_element']:.2f}, {each['kl']:.4f}" for cache, each in ppl.items()
    }
    assert f"| int4 | {bits['int4']} | {bits['int4,sink=8,recent=16']} |" in lines
    assert f"| kivi-int2 | {bits['kivi-int2']} |  |" in lines
    assert (out / "kl.png").stat().st_size > 1000
    with pytest.raises(
        jkvq.UserError, match=r"was measured with tokens=\[240\], not \[200\]: give the"
    ):
        run("compare", *common[:-1], "200", "--caches", "bf16", *chosen)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--caches", "kivi-int2"], "cache 'kivi-int2' exists in"),
        (["--tasks", "gms8k"], "task 'gms8k' is not known"),
        (["--requests", "0"], "requests=0: at least 1"),
        (["--windows", "64"], "windows=64: none, or tokens at the beginning and at the end such"),
        (["--also", "kivi-int2,calibration=x"], "the calibration x is of no use to kivi-int2:"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(text, tmp_path, arguments, sentence):
    given = ("--text", text, "--out", str(tmp_path / "out"), "--model", "no-such-model")
    with pytest.raises(jkvq.UserError, match=sentence):
        run("compare", *given, *arguments)
    assert not (tmp_path / "out").exists()
