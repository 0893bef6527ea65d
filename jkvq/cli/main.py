"""The command line. Texts go to stdout, tables too, everything else to stderr."""

import sys
import warnings
from typing import Annotated

import typer

from jkvq.cli.caches import caches
from jkvq.cli.calibrate import calibrate
from jkvq.cli.convert import convert
from jkvq.cli.evaluate.app import evaluate
from jkvq.cli.generate import generate
from jkvq.cli.inspect import inspect
from jkvq.support.errors import CacheWarning, UserError
from jkvq.support.progress import stderr
from jkvq.version import VERSION

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
app.add_typer(evaluate, name="eval")


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
        _say(f"{message}", "yellow")
    else:
        _show_other_warning(message, category, filename, lineno, file, line)


_show_other_warning = warnings.showwarning


def _say(sentence: str, style: str) -> None:
    stderr().print(f"jkvq: {sentence}", style=style, soft_wrap=True, highlight=False, markup=False)


def main() -> None:
    """Runs the command line; a UserError ends in its sentence and exit code 2."""
    warnings.showwarning = _show_warning
    try:
        app()
    except UserError as error:
        _say(str(error), "red")
        sys.exit(2)
