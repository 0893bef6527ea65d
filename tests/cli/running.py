"""The command line, run as a user does or inside this process."""

import json
import subprocess
import sys

from typer.testing import CliRunner

from jkvq.cli.main import app


def run_process(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """A process of its own, with its two outputs and its exit code; it takes seconds to start."""
    done = run_bytes(*arguments, stdin=stdin.encode())
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def run_bytes(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """The same with what is perhaps no text."""
    command = [sys.executable, "-c", "from jkvq.cli.main import main; main()", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, check=False)


def run(*arguments: str) -> str:
    """What a command prints, or the exception that it ends in."""
    found = CliRunner().invoke(app, arguments)
    if found.exception is not None:
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.stdout


def run_json(*arguments: str) -> dict:
    """What a command prints with --json: one line."""
    printed = run(*arguments, "--json")
    assert printed.count("\n") == 1
    return json.loads(printed)
