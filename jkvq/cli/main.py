"""The command line. Texts go to stdout, tables too, everything else to stderr."""

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import traceback
import warnings
from typing import Annotated, Any

import typer

from jkvq.cli.cache import cache
from jkvq.cli.caches import caches
from jkvq.cli.calibrate import calibrate
from jkvq.cli.compare.command import compare
from jkvq.cli.convert import convert
from jkvq.cli.doctor import doctor
from jkvq.cli.engine import bench_compare, bench_serve, bench_steps  # noqa: F401 (add to `bench`)
from jkvq.cli.engine.batch import batch
from jkvq.cli.engine.bench import bench
from jkvq.cli.engine.chat import chat
from jkvq.cli.engine.interrupts import heeded, terminated
from jkvq.cli.engine.serve import serve
from jkvq.cli.evaluate.app import evaluate
from jkvq.cli.generate import generate
from jkvq.cli.inspect import inspect
from jkvq.cli.tune import tune
from jkvq.support.errors import CacheWarning, UserError
from jkvq.support.progress import clear, say
from jkvq.version import VERSION

_BadArguments: Any = typer.BadParameter.__base__  # its name lies where typer keeps its parser
_INTERRUPTED = 130  # what shells expect after Ctrl-C

app = typer.Typer(
    help="Language models in JAX with a paged KV cache.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(chat)
app.command()(batch)
app.command()(serve)
app.command()(calibrate)
app.command()(tune)
app.command()(compare)
app.command()(inspect)
app.command()(convert)
app.command()(caches)
app.command("methods", hidden=True)(caches)
app.command()(doctor)
app.add_typer(evaluate, name="eval")
app.add_typer(bench, name="bench")
app.add_typer(cache, name="cache")


def _print_version(asked: bool) -> None:
    if asked:
        print(VERSION)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
):
    pass


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    if issubclass(category, CacheWarning):
        say(f"jkvq: {message}", "yellow")
    else:
        _show_other_warning(message, category, filename, lineno, file, line)


_show_other_warning = warnings.showwarning


def main() -> None:
    """Runs the command line; a UserError ends in its sentence and exit code 2.

    The command runs in a thread of its own: this one listens to Ctrl-C, which a compiler, once it
    is called, does not.
    """
    # Of a GPU's memory, before anything has imported JAX, whose own share is three quarters.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    warnings.showwarning = _show_warning
    signal.signal(signal.SIGTERM, _terminated)
    ended: list[int] = []
    over = threading.Event()
    try:
        threading.Thread(target=_run, args=(ended, over), daemon=True).start()
        _wait_for(over)
    except KeyboardInterrupt:
        clear()
        say("jkvq: interrupted", "red")
        _end_with_drafts(_INTERRUPTED)
        ended = [_INTERRUPTED]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # whoever read it has gone
            stream.flush()
    os._exit(ended[0])  # at once: JAX takes half a second to take itself down


def _terminated(number: int, frame: object) -> None:
    """Handles SIGTERM: a command that is filling a folder has nothing else to do first."""
    _end_with_drafts(128 + number)  # as shells have it
    terminated(number, frame)


def _end_with_drafts(code: int) -> None:
    """Ends the process, if it is filling folders, and removes them.

    A shell that takes its place does so: the thread that fills them ends with the process.
    """
    from jkvq.support.atomic import live_drafts

    if drafts := live_drafts():
        with contextlib.suppress(OSError):  # there is no shell
            os.execlp("sh", "sh", "-c", f'rm -rf -- "$@"; exit {code}', "sh", *map(str, drafts))


def _wait_for(over: threading.Event) -> None:
    """Until a command is over, or Ctrl-C comes and the command has nothing else to do at it."""
    while True:
        try:
            while not over.wait(0.1):  # to join its thread would, interrupted, take it for ended
                pass
            return
        except KeyboardInterrupt:
            if not heeded():
                raise


def _run(ended: list[int], over: threading.Event) -> None:
    """The command, with its exit code at the end."""
    ended.append(_exit_code())
    over.set()


def _exit_code() -> int:
    """Runs the command."""
    try:
        return app(prog_name="jkvq", standalone_mode=False) or 0
    except UserError as error:
        return _refuse(str(error))
    except _BadArguments as error:
        return _refuse(_sentence(error)) if error.format_message() else 2  # empty: help is shown
    except typer.Abort:
        say("jkvq: aborted", "red")
        return 1
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def _refuse(sentence: str) -> int:
    if "--json" in sys.argv:  # whoever reads JSON finds it on stdout, whatever happens
        print(json.dumps({"error": sentence}))
    say(f"jkvq: {sentence}", "red")
    return 2


def _sentence(error) -> str:
    """What typer has against the arguments, with the value that was given."""
    names = getattr(getattr(error, "param", None), "opts", ())
    words = error.format_message().rstrip(".")
    for argument, following in itertools.pairwise([*sys.argv, ""]):
        name, equals, value = argument.partition("=")
        if name in names:
            words += f", not {value if equals else following}"
    command = error.ctx.command_path if error.ctx else "jkvq"
    return f"{words}: see {command} -h"
