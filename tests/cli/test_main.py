"""The command line as a user meets it: a process of its own, its two outputs and its exit code."""

import json
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

import jkvq
from tests.cli.running import run, run_process


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "Hi", "--model", "smolm2"], "did you mean smollm2-135m"),
        (["generate", "Hi", "--cache", "bf15"], "cache 'bf15' is not known: did you mean bf16"),
        (["generate", "Hi", "--cache", "kivi-int2"], "`jkvq eval fidelity` only, as a baseline"),
        (["generate", "Hi", "--model", "/nowhere/at/all"], "no file or folder /nowhere/at/all"),
        (["generate", ""], "the prompt is empty"),
        (["inspect", "--memory", "lots"], "'lots' is no size of memory"),
        (["inspect", "--plot", "a.png"], "--plot draws a calibration: name its folder"),
        (["eval", "ppl", "--text", "/nowhere.txt"], "there is no file /nowhere.txt"),
    ],
)
def test_bad_input_is_refused(arguments, sentence):
    with pytest.raises(jkvq.UserError, match=sentence):
        run(*arguments)


def test_bad_input_ends_in_one_sentence_on_stderr():
    done = run_process("generate", "Hi", "--cache", "bf15")
    assert (done.returncode, done.stdout) == (2, "")
    *slow, sentence = done.stderr.splitlines()
    assert sentence == "jkvq: cache 'bf15' is not known: did you mean bf16?"
    assert set(slow) <= {"Starting ..."}  # where importing takes more than a second


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (
            ["generate", "Hi", "--json", "-n", "many"],
            ["--max-new-tokens", "not many", "jkvq generate -h"],
        ),
        (["generate", "Hi", "--json", "--top-p=much"], ["--top-p", "not much", "jkvq generate -h"]),
        (["generate", "Hi", "--json", "--nope"], ["--nope", "jkvq generate -h"]),
        (["tune", "--json", "--bits"], ["--bits", "requires an argument"]),
        (["eval", "ppl", "--json"], ["Missing option '--text'", "jkvq eval ppl -h"]),
        (["evil", "--json"], ["'evil'", "eval", "jkvq -h"]),
    ],
)
def test_arguments_that_cannot_be_read_end_in_one_sentence_too(arguments, names):
    done = run_process(*arguments)
    assert done.returncode == 2
    *_, sentence = done.stderr.splitlines()
    assert json.loads(done.stdout) == {"error": sentence.removeprefix("jkvq: ")}
    assert [name for name in names if name not in sentence] == []


def test_without_a_command_help_is_shown():
    done = run_process("eval")
    assert "Usage: jkvq eval" in done.stdout + done.stderr
    assert done.returncode == 2


def test_ctrl_c_is_obeyed_with_a_word_while_the_command_is_busy():
    # It heeds Ctrl-C even where these tests run in the background, which ignores it.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heed}; from jkvq.cli.main import main; print('here', flush=True); main()"
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", code, "generate", "-"]
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "here\n"
        time.sleep(0.5)  # it waits for a prompt now, deaf to signals as it would be in a compiler
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "jkvq: interrupted\n"
        assert process.wait() == 130


FILLING = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from jkvq.cli import main
from jkvq.support.atomic import drafted

def app(**how):
    with drafted(Path(sys.argv[1])) as draft:
        print("here", flush=True)
        for number in range(10**9):  # also while the draft is being removed
            (draft / "arrays").mkdir(exist_ok=True, parents=True)
            (draft / "arrays" / str(number)).touch()

main.app = app
main.main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_folder_that_is_half_written_goes_when_the_command_is_ended(number, code, tmp_path):
    command = [sys.executable, "-c", FILLING, str(tmp_path / "out")]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(number)
        assert process.wait() == code
    assert list(tmp_path.iterdir()) == []


def test_bad_input_is_an_object_on_stdout_where_json_is_asked_for():
    done = run_process("generate", "Hi", "--cache", "bf15", "--json")
    sentence = "cache 'bf15' is not known: did you mean bf16?"
    assert (done.returncode, json.loads(done.stdout)) == (2, {"error": sentence})
    assert done.stderr.endswith(f"jkvq: {sentence}\n")


def test_version():
    assert run("--version") == f"{jkvq.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], ("jax", "numpy")),
        (["calibrate", "--help"], ("jax", "numpy")),
        (["eval", "niah", "--help"], ("jax", "numpy")),
        (["caches"], ("flax", "orbax", "transformers", "matplotlib")),
    ],
)
def test_commands_import_no_more_than_they_need(arguments, absent):
    code = f"""
import sys
from jkvq.cli.main import app
app({arguments!r}, standalone_mode=False)
print(*({{name.split('.')[0] for name in sys.modules}} & set({absent!r})), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "\n"
    assert done.stdout != ""
