from tests.cli.running import run_json, run_process


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
