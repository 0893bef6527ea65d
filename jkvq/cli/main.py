"""The command line. Texts go to stdout, tables too, everything else to stderr."""

import contextlib
import json
import os
import sys
import threading
import traceback
import warnings
from typing import Annotated

import typer

from jkvq.cli.cache import cache
from jkvq.cli.caches import caches
from jkvq.cli.calibrate import calibrate
from jkvq.cli.convert import convert
from jkvq.cli.doctor import doctor
from jkvq.cli.evaluate.app import evaluate
from jkvq.cli.generate import generate
from jkvq.cli.inspect import inspect
from jkvq.support.errors import CacheWarning, UserError
from jkvq.support.progress import clear, say
from jkvq.version import VERSION

_INTERRUPTED = 130  # what shells expect after Ctrl-C

app = typer.Typer(
    help="Language models in JAX with a paged KV cache.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(calibrate)
app.command()(inspect)
app.command()(convert)
app.command()(caches)
app.command("methods", hidden=True)(caches)
app.command()(doctor)
app.add_typer(evaluate, name="eval")
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
    warnings.showwarning = _show_warning
    ended: list[int] = []
    command = threading.Thread(target=lambda: ended.append(_run()), daemon=True)
    try:
        command.start()
        while command.is_alive():
            command.join(0.1)
    except KeyboardInterrupt:
        clear()
        say("jkvq: interrupted", "red")
        ended = [_INTERRUPTED]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # whoever read it has gone
            stream.flush()
    os._exit(ended[0])  # at once: JAX takes half a second to take itself down


def _run() -> int:
    """The exit code."""
    try:
        app()
    except UserError as error:
        if "--json" in sys.argv:  # whoever reads JSON finds it on stdout, whatever happens
            print(json.dumps({"error": str(error)}))
        say(f"jkvq: {error}", "red")
        return 2
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
