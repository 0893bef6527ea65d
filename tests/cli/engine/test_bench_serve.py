import json

import pytest

import jkvq
from jkvq.bench.serving.client import Timed
from jkvq.bench.serving.measure import summary
from tests.bench.serving.conftest import Scripted, scripted
from tests.cli.running import run, run_json
from tests.test_import_time import write_model


def test_any_server_is_measured_under_every_load(tmp_path):
    with scripted(Scripted(0.0, 0.0)) as url:
        given = ("--url", url, "--scenario", "D(40,3)", "--concurrency", "2,1", "--requests", "2")
        found = run_json("bench", "serve", *given, "--prefix", "0,0.5", "--out", str(tmp_path))
    loads = [(row["load"]["prefix"], row["load"]["level"]) for row in found["rows"]]
    assert loads == [(0, 1), (0, 2), (0.5, 1), (0.5, 2)]
    assert {row["load"]["scenario"] for row in found["rows"]} == {"D(40,3)"}
    assert [row["tokens"] for row in found["rows"]] == [6] * 4
    assert set(found["rows"][0]["ttft"]) == {"mean", "p50", "p90", "p99"}
    assert json.loads((tmp_path / "serve.json").read_text()) == found
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")


def test_it_prints_a_table(monkeypatch):
    async def measure(server, loads, **rest):
        for load in loads:
            done = [Timed(0.0, 0.5, 2.5, 21, 10, 5), Timed(0.0, error="it broke")]
            yield summary(server, load, done)

    monkeypatch.setattr("jkvq.bench.serving.measure.bench_server", measure)
    printed = run("bench", "serve", "--url", "http://x", "--rate", "0.5", "--requests", "2")
    row = next(line for line in printed.splitlines() if "D(256,64)" in line)
    cells = ("0.5 / s", "50%", "2, 1 failed", "21", "500 500 500 500", "10.5", "8.4")
    for cell in (*cells, "100.0 100.0 100.0 100.0", "2.50 2.50 2.50 2.50"):
        assert f"│ {cell} " in row


@pytest.mark.slow
def test_our_own_server_is_started_with_each_cache(tmp_path):
    write_model(tmp_path)
    sizes = ("--scenario", "D(30,3)", "--concurrency", "1", "--requests", "2", "--slots", "1")
    own = ("--model", str(tmp_path), "--caches", "bf16")
    (row,) = run_json("bench", "serve", *own, *sizes)["rows"]
    assert (row["server"], row["failed"]) == ("bf16", 0)
    assert 0 < row["tokens"] <= 6 and 0 < row["ttft"]["p50"] < row["seconds"]


def test_what_a_server_says_that_does_not_start_is_said(tmp_path):
    with pytest.raises(jkvq.UserError, match=r"the server did not start: .*no-such-model"):
        run("bench", "serve", "--model", str(tmp_path / "no-such-model"), "--caches", "bf16")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--url x --caches bf16", "cache is of a server that is started here"),
        ("--url x --slots 3", "slots is of a server that is started here"),
        ("--concurrency 1 --rate 1", "concurrency and rate are two ways to send requests"),
        ("--concurrency x", "concurrency=x: numbers from 1"),
        ("--rate x", "rate=x: numbers with commas between"),
        ("--prefix 1", "prefix=1.0: the share of a prompt, 0 to 0.99"),
        ("--scenario 4", "scenario=4: tokens of the prompt and of the answer"),
        ("--caches nope", "cache 'nope' is not known"),
    ],
)
def test_bad_options_are_refused(arguments, sentence):
    with pytest.raises(jkvq.UserError, match=f"^{sentence}"):
        run("bench", "serve", *arguments.split())
