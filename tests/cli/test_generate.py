import json

import pytest
import typer

import jkvq
from jkvq.cli.generate import generate
from jkvq.engine.generate import Piece
from jkvq.engine.writer import Generation, Timings
from tests.cli.running import run, run_bytes, run_json, run_process


def test_generate_writes_text_and_reports_on_stderr(model):
    given = ("--model", model, "--raw", "-n", "5", "--no-check")  # tests/loading checks
    done = run_process("generate", "-", *given, stdin="Hello")
    assert done.returncode == 0, done.stderr
    found = run_json("generate", "Hello", *given)
    assert done.stdout == found["text"] + "\n"
    assert "5 tokens read" in done.stderr
    assert "\x1b[" not in done.stderr  # no colours or bars where no terminal listens
    assert found["cache"] == "jkvq-int4"
    assert "calibrating on 2,048 tokens" in done.stderr
    assert "jkvq-int4; seed" in done.stderr
    assert len(found["tokens"]) == len(found["logprobs"]) <= 5
    assert set(found["timings"]) == {"prefill", "decode", "compile", "fetch"}


def test_a_file_of_prompts_is_a_batch(model, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("Hello\nA second prompt\n")
    options = {"temperature": 1.0, "seed": 3, "max_new_tokens": 5, "ignore_eos": False}
    llm = jkvq.load(model, cache="bf16")
    expected = jkvq.generate(llm, ["Hello", "A second prompt"], **options)
    given = ("--prompts", str(file), "--model", model, "--cache", "bf16", "--temperature", "1")
    given = ("generate", *given, "--seed", "3", "-n", "5")
    assert run(*given) == f"{expected[0].text}\n---\n{expected[1].text}\n"
    found = [json.loads(line) for line in run(*given, "--json").splitlines()]
    assert [each["tokens"] for each in found] == [each.tokens for each in expected]
    assert [each["seed"] for each in found] == [each.seed for each in expected]


def _generation(text: str, error: str | None = None) -> Generation:
    reason = "length" if error is None else "error"
    return Generation(text, [1], [0.0], reason, 1, 0, Timings(0.0, 1.0, 0.0, 0.0), error)


@pytest.fixture
def two_pieces(monkeypatch, tmp_path):
    """The second prompt is done before the first, which fails."""
    pieces = [
        Piece(1, "b1"),
        Piece(0, "a1"),
        Piece(1, "b2", _generation("b1b2")),
        Piece(0, "a2", _generation("a1a2", error="its scores are not numbers")),
    ]
    llm = type("", (), {"spec": jkvq.parse_spec("bf16")})
    monkeypatch.setattr("jkvq.loading.load.load", lambda *_, **__: llm)
    monkeypatch.setattr("jkvq.engine.generate.stream", lambda *_, **__: iter(pieces))
    (tmp_path / "prompts.txt").write_text("a\nb")
    return tmp_path / "prompts.txt"


def test_texts_of_several_prompts_keep_their_order(two_pieces, capsys):
    with pytest.raises(typer.Exit) as ended:
        generate(prompts=two_pieces)
    assert ended.value.exit_code == 2
    written = capsys.readouterr()
    assert written.out == "a1a2\n---\nb1b2\n"
    assert "1 of 2 prompts failed: its scores are not numbers" in written.err


def test_json_has_a_line_for_each_prompt_the_failed_among_them(two_pieces, capsys):
    with pytest.raises(typer.Exit):
        generate(prompts=two_pieces, as_json=True)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["error"] for each in found] == ["its scores are not numbers", None]


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (["-n", "0"], "max_new_tokens=0: a whole number, 1 or more"),
        (["--top-k", "3000000000"], "top_k=3000000000: a whole number from 1 to 2147483647"),
        (["--temperature", "nan"], "temperature=nan: "),
        (["--seed", "-1"], "seed=-1: "),
        (["--stop", ""], r"stop=\(?\[?''"),
        (["--cache", "bf16", "--calibration", "/nope"], "bf16 takes no calibration: leave it out"),
        (["--cache", "jkvq-int4", "--calibration", "/nope"], "/nope holds no calibration"),
        (["--calibration", "/nope"], "/nope holds no calibration"),
        (["--dtype", "float23"], "dtype 'float23' is not known"),
        (["--implementation", "cuda"], "implementation 'cuda' is not known"),
    ],
)
def test_options_are_refused_before_anything_is_fetched(monkeypatch, option, sentence):
    monkeypatch.setattr("jkvq.loading.load.open_checkpoint", None)
    with pytest.raises(jkvq.UserError, match=sentence):
        run("generate", "Hi", *option)


def test_standard_input_that_is_no_text_is_refused():
    for content in (b"\x93NUMPY\x00", b""):
        done = run_bytes("generate", "-", stdin=content)
        assert done.returncode == 2
        assert done.stderr.startswith(b"jkvq: ") and done.stderr.count(b"\n") == 1
    done = run_bytes("generate", "-", stdin=b"caf\xe9")
    assert b"standard input is no UTF-8 text (at byte 3)" in done.stderr
