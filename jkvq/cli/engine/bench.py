"""`jkvq bench`: how fast things are on this machine."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkvq.cli.evaluate.shared import Caches, Calibrations, calibrated, choose_calibrations
from jkvq.cli.shared import AsJson, Dtype, Implementation, Model, print_json, print_table
from jkvq.defaults import DEFAULT_MODEL
from jkvq.support.errors import UserError
from jkvq.support.progress import note

if TYPE_CHECKING:
    from jkvq.bench.engine import Measured, Spread

bench = typer.Typer(help="Measure how fast it is here.", no_args_is_help=True)


@bench.command("engine")
def bench_command(
    model: Model = DEFAULT_MODEL,
    cache: Caches = "bf16,saw-int4,jkvq-int4",
    concurrency: Annotated[
        str, typer.Option(help="Sequences at once; one or more, with commas between.")
    ] = "1,4,8",
    requests: Annotated[int, typer.Option(help="How many.")] = 32,
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
    from jkvq.bench.engine import Workload, bench_engine, draw_requests, engine_figure
    from jkvq.cache.specs.spec_text import parse_spec, split_names
    from jkvq.llm import with_cache
    from jkvq.models.model import load_model
    from jkvq.support.pictures import save_picture

    workload = Workload(
        requests,
        _range("prompt_tokens", prompt_tokens),
        _range("new_tokens", new_tokens),
        shared_prefix,
        seed,
    )
    names, at_once = split_names(cache), counts("concurrency", concurrency, 4096)
    for name in names:
        parse_spec(name)  # refuses baselines, which are for other commands
    require_known(implementation)
    folders = choose_calibrations(calibration, names)
    make_folder(out)
    plain = load_model(model, dtype=dtype)
    drawn = draw_requests(plain, workload)
    llms = {
        name: with_cache(
            plain, name, calibrated(plain, name, folder), implementation=implementation
        )
        for name, folder in folders.items()
    }
    found = bench_engine(llms, drawn, at_once)
    title = (
        f"{model}, {requests} requests: prompts of {prompt_tokens} tokens, answers of {new_tokens}"
    ) + (f", {shared_prefix} shared" if shared_prefix else "")
    rows = [_as_dict(each) for each in found]
    written = {"model": model, **dataclasses.asdict(workload), "rows": rows}
    if out is not None:
        (out / "engine.json").write_text(json.dumps(written, indent=1) + "\n")
        save_picture(engine_figure(found, title), out / "engine.png")
        note(f"Written: {out / 'engine.json'} and {out / 'engine.png'}.")
    if as_json:
        print_json(written)
        return
    print_table(title, _HEADER, _rows(found))


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
            f"{each.over_calls:.2f}",
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
