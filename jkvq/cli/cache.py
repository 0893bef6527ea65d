"""`jkvq cache`: what is kept in the user's cache."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from jkvq.cli.shared import AsJson, print_json, print_table
from jkvq.support.errors import UserError, nearest
from jkvq.support.progress import note
from jkvq.support.user_cache import cache_folder

if TYPE_CHECKING:
    from jkvq.loading.kept import Kept

cache = typer.Typer(
    help="List, clear and fetch again what is kept on disk: models, calibrations, checks and "
    "compiled programs.",
    invoke_without_command=True,
)


@cache.callback()
def _list_by_default(context: typer.Context, as_json: AsJson = False):
    if context.invoked_subcommand is None:
        list_command(as_json)


@cache.command("list")
def list_command(as_json: AsJson = False):
    """List what is kept, with its size and age, and whether it is whole."""
    from jkvq.loading.kept import list_kept, total

    kept, folder = list_kept(), cache_folder()
    if as_json:
        listed = [{**dataclasses.asdict(each), "path": str(each.path)} for each in kept]
        size = sum(each.bytes for each in kept)
        print_json({"folder": str(folder), "bytes": size, "kept": listed})
        return
    _print(f"{folder}: {total(kept)}", kept)


@cache.command("clear")
def clear_command(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="models, calibrations, checks, compiled, drafts (what killed processes left) or "
            "all.",
            show_default="all",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
):
    """Remove what is kept; it is made or fetched again when it is needed."""
    from jkvq.loading.kept import KINDS, clear, list_kept, total

    kinds = what or ["all"]
    for kind in kinds:
        if kind not in (*KINDS, "all"):
            raise UserError(f"there are no '{kind}' to clear: {nearest(kind, (*KINDS, 'all'))}")
    kept = list_kept(KINDS if "all" in kinds else kinds)
    if not kept:
        note(f"There is nothing to remove in {cache_folder()}")
        return
    if not yes:
        _print(f"To be removed from {cache_folder()}: {total(kept)}", kept)
        typer.confirm("Remove them?", abort=True)
    left = clear(kept)
    for each, reason in left:
        note(f"{each.kind}: {each.name} stays: {reason}")
    removed = [each for each in kept if each not in [other for other, _ in left]]
    note(f"Removed {total(removed)} from {cache_folder()}")


@cache.command("fetch")
def fetch_command(
    model: Annotated[str, typer.Argument(help="Short name, such as smollm2-135m.")],
):
    """Fetch a model again, unless the one that is kept is whole."""
    from jkvq.loading.kept import fetch_model
    from jkvq.models.formats.catalog import cached_file

    name = model.lower()
    fetched = fetch_model(name)
    note(f"{cached_file(name)} is whole: {'fetched now' if fetched else 'nothing to fetch'}")


def _print(title: str, kept: "list[Kept]") -> None:
    from jkvq.support.memory import format_bytes

    rows = (
        (each.kind, each.name, format_bytes(each.bytes), _ago(each.age), each.problem or "whole")
        for each in kept
    )
    print(title)  # a table would fold a long path
    print_table("", ("kind", "name", "size", "age", "state"), rows)


def _ago(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"
