"""The command line as a user meets it: a process of its own, its two outputs and its exit code."""

import subprocess
import sys

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
    assert done.stderr == "jkvq: cache 'bf15' is not known: did you mean bf16?\n"


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
