import dataclasses
import json
from typing import Any

import pytest

import jkvq
from jkvq.bench.engine import Measured, Spread
from jkvq.bench.shapes import SHAPES
from tests.cli.running import run, run_json
from tests.tiny import CONFIG

SIZES: Any = {"prefilled_tokens": 20, "cached_tokens": 0, "pool_bytes": 1500, "preemptions": 0}
TIMES: Any = {"first_token": Spread(0.25, 0.5), "between_tokens": Spread(0.01, 0.02)}
FOUND = [
    Measured("bf16", "one call after the other", 1, 2.0, 40, 20.0, 1.0, None, **TIMES, **SIZES),
    Measured("bf16", "static batches", 2, 2.0, 40, 30.0, 1.5, 1.0, **TIMES, **SIZES),
    Measured("bf16", "engine", 2, 2.0, 40, 60.0, 3.0, 2.0, **TIMES, **SIZES),
]


@pytest.fixture
def given(model, monkeypatch) -> tuple[str, ...]:
    """Arguments of a command that measures nothing; tests/bench measures."""

    def measure(llms, requests, concurrency):
        assert [llm.spec for llm in llms.values()] == [jkvq.parse_spec("bf16")]
        assert (len(requests), concurrency) == (3, [2, 8])
        return FOUND

    monkeypatch.setattr("jkvq.bench.engine.bench_engine", measure)
    sizes = ("--requests", "3", "--prompt-tokens", "4:9", "--new-tokens", "5")
    counts = ("--concurrency", "8,2")
    return ("bench", "engine", "--model", model, "--cache", "bf16", *sizes, *counts)


def test_bench_writes_json_and_draws(given, tmp_path):
    out = tmp_path / "found"
    found = run_json(*given, "--out", str(out))
    assert (found["prompt_tokens"], found["new_tokens"]) == ([4, 9], [5, 5])
    assert [row["way"] for row in found["rows"]] == [each.way for each in FOUND]
    assert found["rows"][2]["first_token"] == {"median": 0.25, "p95": 0.5}
    assert json.loads((out / "engine.json").read_text()) == found
    assert (out / "engine.png").read_bytes().startswith(b"\x89PNG")


def test_bench_prints_a_table(given):
    printed = run(*given)
    assert "3 requests: prompts of 4:9 tokens, answers of 5" in printed
    engine = next(line for line in printed.splitlines() if "│ engine" in line)
    for part in ("60.0", "3.00", "2.00", "250 ms, 500 ms", "10 ms, 20 ms", "1.5 KB"):
        assert f"│ {part} " in engine


def test_an_engine_alone_takes_random_weights_and_as_many_requests_as_run_at_once(monkeypatch):
    config = dataclasses.replace(CONFIG, vocab=600)
    monkeypatch.setitem(SHAPES, "tiny", config)
    sizes = ("--prompt-tokens", "20", "--new-tokens", "3", "--concurrency", "1,6")
    given = ("bench", "engine", "--shape", "tiny", "--cache", "jkvq-int4", "--alone", *sizes)
    found = run_json(*given)["rows"]
    assert [(row["way"], row["concurrency"], row["tokens"]) for row in found] == [
        ("engine", 1, 4 * 3),
        ("engine", 6, 6 * 3),
    ]
    assert {row["over_calls"] for row in found} == {None}
    with pytest.raises(jkvq.UserError, match="random weights have none"):
        run(*given, "--calibration", "here")


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (["--cache", "kivi-int2"], "cache 'kivi-int2' exists in `jkvq eval ppl`"),
        (["--concurrency", "1,x"], "concurrency=1,x: numbers from 1 to 4096 with commas between"),
        (["--concurrency", "0"], "concurrency=0: numbers from 1 to 4096"),
        (["--requests", "0"], "requests=0: a whole number, 1 or more"),
        (["--prompt-tokens", "1:2:3"], "prompt_tokens=1:2:3: a range such as 16:128"),
        (["--new-tokens", "9:3"], "new_tokens=9:3: from 1 up, the smaller number first"),
        (["--shared-prefix", "-1"], "shared_prefix=-1: a whole number, 0 or more"),
        (["--seed", "-1"], "seed=-1: a whole number from 0"),
        (["--implementation", "cuda"], "implementation 'cuda' is not known"),
        (["--calibration", "/nope"], "/nope holds no calibration"),
        (["--out", "/dev/null/here"], "/dev/null/here cannot be made: Not a directory"),
        (["--shape", "qwen3-8b"], "--model and --shape: give one of them"),
        (["--alone", "--requests", "9"], "alone there are as many as run at once"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(option, sentence):
    with pytest.raises(jkvq.UserError, match=sentence):
        run("bench", "engine", *option, "--model", "no-such-model")
