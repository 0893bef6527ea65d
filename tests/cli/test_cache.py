from pathlib import Path

import pytest
from typer.testing import CliRunner

import jkvq
from jkvq.cli.main import app
from tests.cli.running import run, run_json


@pytest.fixture
def program(tmp_path, monkeypatch) -> Path:
    """The only thing in a user's cache."""
    path = tmp_path / "user" / "compiled" / "jit_step-0-cache"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"program")
    monkeypatch.setenv("JKVQ_CACHE", str(tmp_path / "user"))
    return path


def test_cache_lists_what_is_kept(program):
    found = run_json("cache")
    assert run_json("cache", "list")["kept"][0]["name"] == "1 programs"
    assert (found["folder"], found["bytes"]) == (str(program.parents[1]), 7)
    assert found["kept"][0]["path"] == str(program.parent)
    table = run("cache")
    assert "1 programs" in table and "7 B" in table and str(program.parents[1]) in table


def test_cache_is_cleared_when_the_user_agrees(program):
    refused = CliRunner().invoke(app, ["cache", "clear", "compiled"], input="n\n")
    assert refused.exit_code == 1 and "1 programs" in refused.stdout
    assert program.exists()
    agreed = CliRunner().invoke(app, ["cache", "clear", "compiled"], input="y\n")
    assert agreed.exit_code == 0 and not program.exists()


def test_cache_is_cleared_without_a_question(program):
    run("cache", "clear", "checks", "--yes")
    assert program.exists()
    run("cache", "clear", "--yes")
    assert not program.exists()


def test_cache_refuses_kinds_that_there_are_not(program):
    with pytest.raises(jkvq.UserError, match="no 'compile' to clear: did you mean compiled"):
        run("cache", "clear", "compile")
    with pytest.raises(jkvq.UserError, match="did you mean smollm2-135m"):
        run("cache", "fetch", "smollm")
