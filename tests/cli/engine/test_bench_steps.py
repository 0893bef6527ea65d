import json

import pytest

from jkvq.bench.split import Split
from jkvq.bench.steps import DecodeStep, PrefillStep
from jkvq.support.errors import UserError
from tests.cli.running import run, run_json

SPLIT = Split(2.0, 1.0, 0.5, 0.25, 0.25)
DECODE = [
    DecodeStep("bf16", 2, 16, 4.0, 500.0, 2_000_000, 0.5, 1.0, 9, 1.0, SPLIT),
    DecodeStep("int4", 2, 16, None, None, 1_000_000, None, None, None, 0.0, None),
]
PREFILL = [PrefillStep("bf16", 2, 16, 1234.0, 1.0, 3.0)]


@pytest.fixture
def measured(monkeypatch):
    """Commands that measure nothing; tests/bench measures."""

    def decode(llms, batches, contexts):
        assert (list(llms), batches, contexts) == (["bf16", "int4"], [1, 2], [16])
        return iter(DECODE)

    monkeypatch.setattr("jkvq.bench.steps.bench_decode", decode)
    monkeypatch.setattr("jkvq.bench.steps.bench_prefill", lambda *_: iter(PREFILL))


def test_decode_prints_a_table_and_writes(model, measured, tmp_path):
    sizes = ("--batch", "2,1", "--context", "16", "--cache", "bf16,int4")
    given = ("bench", "decode", "--model", model, *sizes)
    printed = run(*given)
    for part in ("4.00", "2.00", "0.25", "500.0", "2 MB", "0.50", "9", "does not fit"):
        assert f"│ {part} " in printed
    found = run_json(*given, "--out", str(tmp_path / "new"))
    assert found["rows"][0]["milliseconds"] == 4.0
    assert json.loads((tmp_path / "new" / "decode.json").read_text()) == found
    assert (tmp_path / "new" / "decode.png").read_bytes().startswith(b"\x89PNG")


def test_prefill_prints_a_table(model, measured):
    printed = run("bench", "prefill", "--model", model, "--cache", "bf16", "--context", "16")
    assert "│ 1,234 " in printed and "prefill of" in printed


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("--shape", "qwen9"), "shape 'qwen9' is not known"),
        (("--batch", "0"), "batch=0: numbers from 1 to 4096"),
        (("--batch", "a"), "batch=a: numbers from 1 to 4096"),
        (("--context", "-1"), "context=-1: numbers from 1"),
        (("--context", "100000"), "context=100000: the model has"),
        (("--cache", "int5,"), "int5"),
    ],
)
def test_bad_input_gets_a_sentence(model, given, sentence):
    chosen = () if "--shape" in given else ("--model", model)
    with pytest.raises(UserError, match=sentence):
        run("bench", "decode", *chosen, *given)


def test_a_model_and_a_shape_are_refused(model):
    with pytest.raises(UserError, match="--model and --shape: give one of them"):
        run("bench", "decode", "--model", model, "--shape", "qwen3-8b")
