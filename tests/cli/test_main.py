"""The command line as a user meets it: a process of its own, its two outputs and its exit code."""

import json
import subprocess
import sys

import pytest

import jkvq
from jkvq.cache.presets import PRESETS
from jkvq.models.formats.converted_folder import write_converted
from tests.tiny import CONFIG


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_converted(path, CONFIG, tiny.params, tiny.tokenizer)
    return str(path)


def _jkvq(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from jkvq.cli import main; main()", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


def _json(*arguments: str) -> dict:
    done = _jkvq(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


def test_generate_writes_text_and_reports_on_stderr(model):
    given = ("--model", model, "--raw", "-n", "5", "--no-check")  # tests/test_load.py checks
    done = _jkvq("generate", "-", *given, stdin="Hello")
    assert done.returncode == 0, done.stderr
    found = _json("generate", "Hello", *given)
    assert done.stdout == found["text"] + "\n"
    assert "5 tokens read" in done.stderr
    assert "\x1b[" not in done.stderr  # no colours or bars where no terminal listens
    assert found["cache"] == "jkvq-int4"
    assert "calibrating on 2,048 tokens" in done.stderr
    assert "jkvq-int4; seed" in done.stderr
    assert len(found["tokens"]) == len(found["logprobs"]) <= 5
    assert set(found["timings"]) == {"prefill", "decode", "compile"}


def test_inspect_reports_the_memory(model):
    given = ("inspect", "--model", model, "--cache", "bf16", "--context", "128", "--batch", "2")
    found = _json(*given, "--memory", "1MB")
    per_token = 2 * CONFIG.layers * CONFIG.kv_heads * CONFIG.head_dim * 2
    assert found["per_packed_token"] == per_token
    assert found["bits_per_element"] == 16
    assert found["per_sequence"] == 128 * per_token
    assert "16.00 bits per element" in _jkvq(*given).stdout
    default = _json("inspect", "--model", model)
    packed, exact = (1024 - 64 - 64) / 1024, (64 + 64 + 64) / 1024  # windows, and a page to fill
    bits = packed * (4 + 32 / 16) + exact * 16
    assert (default["cache_name"], default["bits_per_element"]) == ("jkvq-int4", bits)


def test_methods_lists_every_preset():
    found = _json("methods")["methods"]
    assert list(found) == list(PRESETS)
    assert found["saw-int4"]["bits_per_element"] == 4.25
    assert found["oscar-int2"]["bits_per_element"] <= 2.30  # the 16-bit windows among them
    assert found["tq-k3v3"]["bits_per_element"] <= 3.13
    assert "bdr128-k" not in _json("methods", "--head-dim", "64")["methods"]


def test_eval_ppl_compares_caches(model, tmp_path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog.")
    found = _json(
        *("eval", "ppl", "--model", model, "--text", str(tmp_path / "text.txt")),
        *("--tokens", "40", "--cache", "int4,page=8,f32"),
    )
    assert (found["model"], found["tokens"]) == (model, 40)
    results = found["results"]
    assert list(results) == ["bf16", "int4,page=8", "f32"]  # the 16-bit cache is always there
    assert results["f32"]["ppl"] == pytest.approx(results["bf16"]["ppl"], rel=0.02)
    assert 0 == results["bf16"]["kl"] < results["f32"]["kl"] < results["int4,page=8"]["kl"]


def test_convert_writes_a_folder_that_loads(model, tmp_path):
    out = tmp_path / "new" / "copy"
    found = _json("convert", "--model", model, "--out", str(out))
    assert found["bytes"] == sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    copy, original = (jkvq.load(folder, cache="bf16") for folder in (out, model))
    options = {"max_new_tokens": 3, "temperature": 0.0}
    found, expected = (jkvq.generate(llm, "Hi", **options) for llm in (copy, original))
    assert found.tokens == expected.tokens
    again = _jkvq("convert", "--model", model, "--out", str(out))
    assert (again.returncode, "exists and is not empty" in again.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "Hi", "--model", "smolm2"], "did you mean smollm2-135m"),
        (["generate", "Hi", "--cache", "bf15"], "cache 'bf15' is not known: did you mean bf16"),
        (["generate", "Hi", "--cache", "kivi-int2"], "`jkvq eval fidelity` only, as a baseline"),
        (["generate", "Hi", "--model", "/nowhere/at/all"], "no file or folder /nowhere/at/all"),
        (["generate", ""], "the prompt is empty"),
        (["inspect", "--memory", "lots"], "'lots' is no size of memory"),
        (["eval", "ppl", "--text", "/nowhere.txt"], "there is no file /nowhere.txt"),
    ],
)
def test_bad_input_ends_in_one_sentence(arguments, sentence):
    done = _jkvq(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
