"""`jkvq inspect`: what a model and its cache take of memory, and what a calibration holds."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jkvq.cli.shared import AsJson, ChosenCache, Dtype, Model, print_json, print_table
from jkvq.defaults import DEFAULT_MODEL
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
    model: Model = DEFAULT_MODEL,
    cache: ChosenCache = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens per sequence.", show_default="the model's")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    memory: Annotated[
        str | None,
        typer.Option(help="Such as 24GB or 80GiB.", show_default="what is free here"),
    ] = None,
    dtype: Dtype = None,
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
    from jkvq.cache.specs.spec_text import parse_spec, spec_text
    from jkvq.loading.load import default_cache
    from jkvq.models.decoder import weight_bytes
    from jkvq.models.formats.checkpoint import open_checkpoint
    from jkvq.models.model import compute_dtype
    from jkvq.support.memory import free_bytes, parse_bytes

    named, compute = None if cache is None else parse_spec(cache), compute_dtype(dtype)
    room = free_bytes() if memory is None else parse_bytes(memory)
    config = open_checkpoint(model).config
    spec = default_cache(config)[0] if named is None else named
    cache, context = cache or spec_text(spec), config.context if context is None else context
    weights = weight_bytes(config, compute)
    size = footprint(config, spec, weights=weights, context=context, batch=batch, memory=room)
    if as_json:
        described = {"model": model, "cache_name": cache, "context": context, "batch": batch}
        stored = {"architecture": dataclasses.asdict(config), "memory": room}
        print_json(described | stored | dataclasses.asdict(size))
        return
    rows = _rows(config, size, compute.__name__, context, batch, room)
    print_table(f"{model}, {cache}", ("", ""), rows.items())


def _rows(
    config: "ModelConfig", size: "Footprint", dtype: str, context: int, batch: int, room: int | None
) -> dict[str, str]:
    from jkvq.support.memory import format_bytes

    rows = {
        "architecture": f"{config.family}: {config.layers} layers, width {config.width}, "
        f"{config.heads} query and {config.kv_heads} KV heads of {config.head_dim}",
        f"weights, {dtype}": format_bytes(size.weights),
        "cache per packed token": f"{size.per_packed_token:,.0f} B",
        "16-bit window per sequence": format_bytes(size.window),
        f"cache per sequence of {context:,}": f"{format_bytes(size.per_sequence)}, "
        f"{size.bits_per_element:.2f} bits per element",
        f"cache of {batch:,} sequence(s)": format_bytes(size.cache),
        "weights and cache": format_bytes(size.total),
    }
    if room is not None:
        rows[f"sequences that fit {format_bytes(room)}"] = f"{size.fits:,}"
    return rows


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
