"""`jkvq bench`: how fast things are on this machine."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkvq.cli.evaluate.shared import Caches, Calibrations, calibrated, choose_calibrations
from jkvq.cli.shared import AsJson, Dtype, Implementation, print_json, print_table
from jkvq.defaults import DEFAULT_MODEL
from jkvq.support.errors import UserError
from jkvq.support.progress import note

if TYPE_CHECKING:
    from jkvq.bench.engine import Measured, Spread
    from jkvq.llm import LLM
    from jkvq.models.model import Model as LoadedModel

ModelOrNone = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Short name, folder, .gguf file or hub id.",
        show_default=f"{DEFAULT_MODEL}, unless there is a shape",
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(
        help="Random weights in the shape of qwen3-4b, qwen3-8b, qwen3-32b or qwen3-30b-a3b, "
        "instead of a model.",
        show_default=False,
    ),
]

bench = typer.Typer(help="Measure how fast it is here.", no_args_is_help=True)


@bench.command("engine")
def bench_command(
    model: ModelOrNone = None,
    shape: Shape = None,
    cache: Caches = "bf16,saw-int4,jkvq-int4",
    concurrency: Annotated[
        str, typer.Option(help="Sequences at once; one or more, with commas between.")
    ] = "1,4,8",
    requests: Annotated[
        int | None,
        typer.Option(help="How many.", show_default="32; alone, as many as run at once"),
    ] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="The engine, and neither calls nor batches.")
    ] = False,
    prompt_tokens: Annotated[
        str, typer.Option(help="Of each prompt: drawn from this range.")
    ] = "16:128",
    new_tokens: Annotated[
        str, typer.Option(help="Of each answer: drawn from this range.")
    ] = "8:64",
    shared_prefix: Annotated[
        int, typer.Option(help="Tokens that all prompts begin with, besides their own.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for engine.json and engine.png.", show_default=False),
    ] = None,
    calibration: Calibrations = [],  # noqa: B006 (typer copies it)
    dtype: Dtype = None,
    implementation: Implementation = None,
    as_json: AsJson = False,
):
    """Throughput and waiting times of the engine, against static batches and single calls.

    The same random requests, all there at once, run in each way.
    """
    from jkvq.attention.implementation import require_known
    from jkvq.bench.engine import (
        FEWEST,
        Workload,
        bench_engine,
        bench_loads,
        draw_requests,
        engine_figure,
    )
    from jkvq.cache.specs.spec_text import parse_spec, split_names
    from jkvq.support.pictures import save_picture

    require_one(model, shape)
    if alone and requests is not None:
        raise UserError("--alone and --requests: alone there are as many as run at once")
    if shape is not None and calibration:
        raise UserError("--shape and --calibration: random weights have none")
    names, at_once = split_names(cache), counts("concurrency", concurrency, 4096)
    if requests is None:
        requests = max(at_once[-1], FEWEST) if alone else 32
    workload = Workload(
        requests,
        _range("prompt_tokens", prompt_tokens),
        _range("new_tokens", new_tokens),
        shared_prefix,
        seed,
    )
    for name in names:
        parse_spec(name)  # refuses baselines, which are for other commands
    require_known(implementation)
    folders = {} if shape else choose_calibrations(calibration, names)
    make_folder(out)
    plain = plain_model(model, shape, dtype)
    drawn = draw_requests(plain, workload)
    llms = {name: _with_cache(plain, name, folders, implementation) for name in names}
    found = (bench_loads if alone else bench_engine)(llms, drawn, at_once)
    what = shape or model or DEFAULT_MODEL
    many = "as many requests as run at once" if alone else f"{requests} requests"
    shared = f", {shared_prefix} shared" if shared_prefix else ""
    title = f"{what}, {many}: prompts of {prompt_tokens} tokens{shared}, answers of {new_tokens}"
    rows = [_as_dict(each) for each in found]
    written = {"model": what, **dataclasses.asdict(workload), "rows": rows}
    if out is not None:
        (out / "engine.json").write_text(json.dumps(written, indent=1) + "\n")
        save_picture(engine_figure(found, title), out / "engine.png")
        note(f"Written: {out / 'engine.json'} and {out / 'engine.png'}.")
    if as_json:
        print_json(written)
        return
    print_table(title, _HEADER, _rows(found))


def require_one(model: str | None, shape: str | None) -> None:
    """Refuses a shape beside a model, and one that is not known."""
    from jkvq.bench.shapes import shape_config

    if model is not None and shape is not None:
        raise UserError("--model and --shape: give one of them")
    if shape is not None:
        shape_config(shape)


def plain_model(model: str | None, shape: str | None, dtype: str | None) -> "LoadedModel":
    """A model, or random weights in a shape."""
    from jkvq.bench.shapes import random_model, shape_config
    from jkvq.models.dtype import compute_dtype
    from jkvq.models.model import load_model

    if shape is None:
        return load_model(model or DEFAULT_MODEL, dtype=dtype)
    return random_model(shape_config(shape), compute_dtype(dtype))


def _with_cache(
    plain: "LoadedModel",
    name: str,
    folders: Mapping[str, Path | None],
    implementation: str | None,
) -> "LLM":
    """A model with a cache; random weights, which have no folders, are calibrated by numbers."""
    from jkvq.bench.shapes import with_any_cache
    from jkvq.cache.specs.spec_text import parse_spec
    from jkvq.llm import with_cache

    if name not in folders:
        return with_any_cache(plain, parse_spec(name), implementation)
    calibration = calibrated(plain, name, folders[name])
    return with_cache(plain, name, calibration, implementation=implementation)


_HEADER = (
    "cache",
    "way",
    "at once",
    "tokens/s",
    "/ calls",
    "/ batches",
    "first token, p95",
    "between, p95",
    "prefilled",
    "cached",
    "pool",
    "preempted",
)


def _rows(found: "Sequence[Measured]") -> Iterator[tuple[str, ...]]:
    from jkvq.support.memory import format_bytes

    for each in found:
        yield (
            each.cache,
            each.way,
            str(each.concurrency),
            f"{each.tokens_per_second:,.1f}",
            "" if each.over_calls is None else f"{each.over_calls:.2f}",
            "" if each.over_batches is None else f"{each.over_batches:.2f}",
            _times(each.first_token),
            _times(each.between_tokens),
            f"{each.prefilled_tokens:,}",
            f"{each.cached_tokens:,}",
            format_bytes(each.pool_bytes),
            str(each.preemptions),
        )


def _times(spread: "Spread") -> str:
    """The median and the 95th percentile."""
    return ", ".join(f"{1000 * each:,.0f} ms" for each in spread)


def _as_dict(measured: "Measured") -> dict[str, Any]:
    spreads = {
        name: getattr(measured, name)._asdict() for name in ("first_token", "between_tokens")
    }
    return {**dataclasses.asdict(measured), **spreads}


def _range(name: str, text: str) -> tuple[int, int]:
    """Two numbers with a colon between, or one for both."""
    try:
        parts = [int(part) for part in text.split(":")]
        least, most = parts if len(parts) > 1 else parts * 2
        return least, most
    except ValueError:
        raise UserError(f"{name}={text}: a range such as 16:128, or one number") from None


def counts(name: str, text: str, most: int) -> list[int]:
    """Whole numbers with commas between, ascending."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if not 1 <= found[0] <= found[-1] <= most:
        raise UserError(f"{name}={text}: numbers from 1 to {most} with commas between")
    return found


def make_folder(folder: Path | None) -> None:
    """Refuses, before any work, a folder that cannot be there."""
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be made: {error.strerror}") from None
