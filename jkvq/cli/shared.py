"""What the commands share: their common options, and how they print.

Modules of this folder import what does the work inside their functions, so that `jkvq --help` and
every `jkvq COMMAND --help` answer at once; help texts therefore name choices and defaults in words,
which tests compare with the code.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jkvq.defaults import DEFAULT_CACHES
from jkvq.support.errors import UserError

Model = Annotated[
    str, typer.Option("--model", "-m", help="Short name, folder, .gguf file or hub id.")
]
ChosenCache = Annotated[
    str | None,
    typer.Option(
        "--cache",
        help="How the cache is stored; `jkvq caches` lists the names.",
        show_default=f"{DEFAULT_CACHES[0]}, where the model can have it",
    ),
]
CalibrationFolder = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        help="A folder that `jkvq calibrate` wrote.",
        show_default="the one kept for the model, made on first use",
    ),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check/--no-check",
        help="On a cache's first use with a model, measure whether it breaks the model.",
    ),
]
DTYPE_HELP = "What the model computes in: float32, bfloat16 or float16."
Dtype = Annotated[
    str | None,
    typer.Option(
        help=DTYPE_HELP,
        show_default="the fastest here",
    ),
]
Implementation = Annotated[
    str | None,
    typer.Option(
        help="What attention and the cache run on: pallas (GPU kernels; triton or mosaic forces "
        "those of one compiler), reference (plain JAX) or interpret (the kernels step by step, "
        "for tests).",
        show_default="the fastest here",
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        help="Answer on a Ray cluster, one engine for each GPU: auto finds the cluster that this "
        "machine is part of, local starts one, or give an address.",
        show_default="in this process",
    ),
]
Actors = Annotated[
    int | None,
    typer.Option(help="Engines on the cluster.", show_default="one for each GPU"),
]
TextOrProse = Annotated[
    Path | None,
    typer.Option(
        help="A text file; .gz is read as it is.",
        show_default="the prose of Python's documentation",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def require_positive(**numbers: int) -> None:
    """Refuses numbers below 1, by their names."""
    for name, number in numbers.items():
        if number < 1:
            raise UserError(f"{name}={number}: at least 1 is needed")


def print_json(value: dict[str, Any]) -> None:
    """One line of JSON on stdout."""
    print(json.dumps(value))


def print_table(title: str, header: tuple[str, ...], rows) -> None:
    """A table on stdout; a header of empty names is left out. Brackets are no markup."""
    table = Table(title=escape(title), title_justify="left", show_header=any(header))
    for name in header:
        table.add_column(escape(name))
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console()
    if not console.is_terminal:
        console.width = 200  # nothing is cut in a file
    console.print(table)
