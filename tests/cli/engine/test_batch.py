import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import jkvq
from jkvq.cli.engine.interrupts import heeded
from jkvq.cli.main import app
from tests.cli.running import run


@pytest.fixture
def requests(tmp_path) -> Path:
    path = tmp_path / "requests.jsonl"
    lines = [{"prompt": "Hello"}, {"prompt": "Hello", "max_new_tokens": 2, "id": "b"}, {}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def no_model(monkeypatch) -> None:
    monkeypatch.setattr("jkvq.loading.load.load", None)


def test_a_file_is_answered_and_then_left_alone(model, requests, tmp_path, monkeypatch):
    out = tmp_path / "answers.jsonl"
    given = ("batch", str(requests), "--out", str(out), "--model", model, "--cache", "bf16")
    given = (*given, "--slots", "2", "-n", "4", "--memory", "0.5", "--seed", "3", "--no-check")
    done = CliRunner().invoke(app, given)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "6 tokens written" in done.stderr and "10 read, 0% of them stored" in done.stderr
    assert done.stderr.endswith(f"3 answers in {out}, 1 of them errors\n")
    found = {each["line"]: each for each in map(json.loads, out.read_text().splitlines())}
    assert [found[line].get("completion_tokens") for line in (1, 2, 3)] == [4, 2, None]
    assert (found[2]["custom_id"], found[1]["text"][:2]) == ("b", found[2]["text"])
    written = out.read_text()
    monkeypatch.setattr("jkvq.loading.load.load", None)  # it need not be loaded again
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0
    assert f"3 of 3 requests are answered in {out} already" in done.stderr
    assert out.read_text() == written


@pytest.mark.usefixtures("no_model")
def test_if_all_requests_fail_so_does_the_command(tmp_path):
    requests, out = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_text("{}\n")
    out.write_text('{"line": 1, "text": null, "error": "no prompt"}\n')
    assert CliRunner().invoke(app, ("batch", str(requests), "--out", str(out))).exit_code == 2


def test_ctrl_c_says_how_to_go_on(requests, tmp_path, monkeypatch):
    def load(*_, **__):
        assert not heeded()  # it ends the command
        raise typer.Exit(130)

    monkeypatch.setattr("jkvq.loading.load.load", load)
    done = CliRunner().invoke(app, ("batch", str(requests), "--out", str(tmp_path / "out")))
    assert done.exit_code == 130
    assert "keeps the answers so far; the same command goes on from them" in done.stderr


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (["-n", "0"], "max_new_tokens=0: a whole number, 1 or more"),
        (["--seed", "-1"], "seed=-1: "),
        (["--slots", "0"], "slots=0: at least 1 is needed"),
        (["--out", "{requests}"], "is the file of requests: name another"),
        (["--out", "{requests}/a/b"], "b cannot be written: "),
    ],
)
def test_options_are_refused_before_anything_is_loaded(requests, tmp_path, option, sentence):
    option = [each.format(requests=requests) for each in option]
    with pytest.raises(jkvq.UserError, match=sentence):
        run("batch", str(requests), "--out", str(tmp_path / "out"), *option)


@pytest.mark.usefixtures("no_model")
def test_a_file_of_requests_is_needed(tmp_path):
    with pytest.raises(jkvq.UserError, match="there is no file"):
        run("batch", str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "out"))
