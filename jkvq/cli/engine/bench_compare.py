"""`jkvq bench compare`: the same decode steps through ``transformers`` on the same device."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkvq.cli.engine.bench import bench, counts, make_folder
from jkvq.cli.engine.bench_steps import Batch, Context, Out
from jkvq.cli.evaluate.shared import Caches
from jkvq.cli.shared import AsJson, print_json, print_table
from jkvq.support.progress import note

if TYPE_CHECKING:
    from jkvq.bench.steps import DecodeStep

THEIRS = "transformers, 16 bits"


@bench.command("compare")
def compare_command(
    shape: Annotated[
        str, typer.Option(help="Random weights in the shape of qwen3-4b, qwen3-8b or qwen3-32b.")
    ] = "qwen3-4b",
    cache: Caches = "bf16,jkvq-int4,jkvq-int2",
    batch: Batch = "1,32",
    context: Context = "8192",
    out: Out = None,
    as_json: AsJson = False,
):
    """Decode steps beside those of ``transformers``' generate (needs torch and transformers).

    Both are greedy, with random weights and contexts that are random numbers in the cache. Theirs
    runs first, in a process of its own, with its default cache and attention.
    """
    from jkvq.bench.shapes import random_model, shape_config, with_any_cache
    from jkvq.bench.steps import bench_decode
    from jkvq.bench.transformers_steps import bench_transformers
    from jkvq.cache.specs.spec_text import parse_spec, split_names
    from jkvq.models.dtype import compute_dtype

    config, specs = shape_config(shape), {name: parse_spec(name) for name in split_names(cache)}
    batches, contexts = counts("batch", batch, 4096), counts("context", context, 1 << 24)
    make_folder(out)
    note("Measuring transformers.")
    theirs = bench_transformers(config, batches, contexts)
    note("Measuring jkvq.")
    model = random_model(config, compute_dtype(None))
    llms = {name: with_any_cache(model, spec) for name, spec in specs.items()}
    rows = [
        {"cache": THEIRS, "batch": each, "context": tokens, "milliseconds": ms}
        for (each, tokens), ms in theirs.items()
    ]
    rows += [_row(step, theirs) for step in bench_decode(llms, batches, contexts)]
    written = {"shape": shape, "rows": rows}
    if out is not None:
        (out / "compare.json").write_text(json.dumps(written, indent=1) + "\n")
        note(f"Written: {out / 'compare.json'}.")
    if as_json:
        print_json(written)
        return
    header = "cache", "batch", "context", "ms", "times as fast"
    print_table(f"decode of {shape} beside transformers", header, map(_shown, rows))


def _row(step: "DecodeStep", theirs: dict[tuple[int, int], float | None]) -> dict[str, Any]:
    base, own = theirs[step.batch, step.context], step.milliseconds
    over = None if base is None or own is None else base / own
    return {**dataclasses.asdict(step), "over_transformers": over}


def _shown(row: dict[str, Any]) -> tuple[str, ...]:
    ms, over = row["milliseconds"], row.get("over_transformers")
    return (
        *(row["cache"], f"{row['batch']:,}", f"{row['context']:,}"),
        "does not fit" if ms is None else f"{ms:.2f}",
        "" if over is None else f"{over:.2f}",
    )
