"""`jkvq inspect`: what a model and its cache take of memory, and what a calibration holds."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jkvq.cli.shared import DTYPE_HELP, AsJson, print_json, print_table
from jkvq.defaults import DEFAULT_CACHES, DEFAULT_MODEL
from jkvq.support.errors import UserError

if TYPE_CHECKING:
    from jkvq.cache.footprint import Footprint
    from jkvq.models.config import ModelConfig


def inspect(
    folder: Annotated[
        Path | None, typer.Argument(help="A calibration to explain, instead of a model.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the calibration into this PNG file.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="Short name, folder, .gguf file, hub id or config.json."
        ),
    ] = DEFAULT_MODEL,
    cache: Annotated[
        str | None,
        typer.Option(
            help="One or more, with commas between; `jkvq caches` lists the names.",
            show_default=f"{DEFAULT_CACHES[0]}, where the model can have it",
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens per sequence.", show_default="the model's")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    memory: Annotated[
        str | None,
        typer.Option(help="Such as 24GB or 80GiB.", show_default="what is free here"),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help=DTYPE_HELP, show_default="bfloat16 with --memory, else the fastest here"),
    ] = None,
    as_json: AsJson = False,
):
    """Show what a model and its cache take of memory, or explain a calibration."""
    if folder is not None:
        _inspect_calibration(folder, plot, as_json)
        return
    if plot is not None:
        raise UserError("--plot draws a calibration: name its folder")
    _inspect_memory(model, cache, context, batch, memory, dtype, as_json)


def _inspect_memory(
    model: str,
    cache: str | None,
    context: int | None,
    batch: int,
    memory: str | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    from jkvq.cache.footprint import footprint
    from jkvq.cache.specs.spec_text import parse_spec, spec_text, split_names
    from jkvq.loading.load import default_cache
    from jkvq.models.decoder import weight_bytes
    from jkvq.models.dtype import compute_dtype
    from jkvq.support.memory import free_bytes, parse_bytes

    specs = {} if cache is None else {name: parse_spec(name) for name in split_names(cache)}
    if memory is None:
        compute, room = compute_dtype(dtype), free_bytes()
    else:  # a GPU's, from wherever it is asked for
        compute, room = compute_dtype(dtype or "bfloat16"), parse_bytes(memory)
    config = _architecture(model)
    if not specs:
        spec = default_cache(config)[0]
        specs = {spec_text(spec): spec}
    asked = {"context": config.context if context is None else context, "batch": batch}
    weights = weight_bytes(config, compute)
    sizes = {
        name: footprint(config, spec, weights=weights, memory=room, **asked)
        for name, spec in specs.items()
    }
    if as_json:
        stored = {"architecture": dataclasses.asdict(config), "memory": room}
        caches = {name: dataclasses.asdict(size) for name, size in sizes.items()}
        print_json({"model": model, **asked, **stored, "caches": caches})
        return
    title = (
        f"{model}: {config.family}, {config.layers} layers, width {config.width}, "
        f"{config.heads} query and {config.kv_heads} KV heads of {config.head_dim}"
    )
    columns = [_sizes(size, compute.__name__, room, **asked) for size in sizes.values()]
    rows = ((name, *(column[name] for column in columns)) for name in columns[0])
    print_table(title, ("", *sizes), rows)


def _architecture(model: str) -> "ModelConfig":
    """Of a checkpoint, or of a config.json alone, as no weights are read here."""
    from jkvq.models.formats.checkpoint import open_checkpoint
    from jkvq.models.formats.hf_folder import read_config

    path = Path(model).expanduser()
    return read_config(path) if path.name == "config.json" else open_checkpoint(model).config


def _sizes(
    size: "Footprint", dtype: str, room: int | None, context: int, batch: int
) -> dict[str, str]:
    """What the table says of one cache."""
    from jkvq.support.memory import format_bytes

    said = {
        f"weights, {dtype}": format_bytes(size.weights),
        "cache per packed token": f"{size.per_packed_token:,.0f} B",
        "windows per sequence": format_bytes(size.window),
        f"cache per sequence of {context:,}": format_bytes(size.per_sequence),
        "bits per element of such a sequence": f"{size.bits_per_element:.2f}",
        f"cache of {batch:,} sequence(s)": format_bytes(size.cache),
        "weights and cache": format_bytes(size.total),
    }
    if room is not None:
        said[f"sequences of {context:,} that fit {format_bytes(room)}"] = f"{size.fits:,}"
    if room is not None and size.fits_tokens is not None:
        said[f"tokens that fit {format_bytes(room)} as one sequence"] = f"{size.fits_tokens:,}"
    return said


def _inspect_calibration(folder: Path, plot: Path | None, as_json: bool) -> None:
    from jkvq.calibration.artefact import load_artefact
    from jkvq.calibration.drawing import draw
    from jkvq.calibration.explain import explain
    from jkvq.support.pictures import check_picture, save_picture

    check_picture(plot)
    artefact = load_artefact(folder)
    if plot is not None:
        save_picture(draw(artefact), plot)
    if as_json:
        print_json({**dataclasses.asdict(artefact.manifest), "says": explain(artefact)})
        return
    for line in explain(artefact):
        print(line)
    if plot is not None:
        print(f"Drawn in {plot}.")
