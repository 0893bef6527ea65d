"""What the commands share: their common options, and how they print."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jkvq.loading.load import DEFAULT_CACHES

Model = Annotated[
    str, typer.Option("--model", "-m", help="Short name, folder, .gguf file or hub id.")
]
ChosenCache = Annotated[
    str | None,
    typer.Option(
        "--cache",
        help="How the cache is stored; see `jkvq methods`.",
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
Dtype = Annotated[
    str | None, typer.Option(help="float32 or bfloat16; by default what is fastest here.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def print_json(value: dict[str, Any]) -> None:
    """One line of JSON on stdout."""
    print(json.dumps(value))


def print_table(title: str, header: tuple[str, ...], rows) -> None:
    """A table on stdout; a header of empty names is left out."""
    table = Table(title=title, title_justify="left", show_header=any(header))
    for name in header:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = 200  # nothing is cut in a file
    console.print(table)
