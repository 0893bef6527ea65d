"""Times the cells of the tables of steps and prompts in docs/performance.md, all in one run.

    python -m scripts.bench.cells --out cells.json

`jkvq bench decode` and `jkvq bench prefill` measure every cache at every batch and context; these
are the cells that say something. Each is printed and written as soon as it is there.
"""

import dataclasses
import gc
import json
from pathlib import Path
from typing import Annotated

import jax
import typer

from jkvq.bench.shapes import random_model, shape_config, with_any_cache
from jkvq.bench.steps import bench_decode, bench_prefill, stream_bandwidth
from jkvq.cache.specs.spec_text import parse_spec

# Of each cache: sequences, and tokens of each. Caches that take most of the memory come first:
# behind smaller ones it is in pieces.
DECODE = {
    "bf16": [(7, 102400), (20, 32768), (32, 8192), (1, 1024), (1, 102400)],
    "jkvq-int4": [(128, 8192), (32, 32768), (20, 32768), (32, 8192), (1, 1024), (1, 102400)],
    "jkvq-int2": [(38, 102400), (32, 32768), (20, 32768), (32, 8192)],
    "int4": [(32, 8192)],
    "saw-int4": [(32, 8192)],
}
PREFILL = {cache: [(8, 8192), (1, 32768)] for cache in ("bf16", "jkvq-int4")}


def main(
    shape: Annotated[str, typer.Option(help="Whose random weights.")] = "qwen3-8b",
    out: Annotated[Path | None, typer.Option(help="A JSON file.")] = None,
) -> None:
    """Prints a line for each cell."""
    if jax.default_backend() != "gpu":
        raise SystemExit("there is no GPU here, and what the tables say is of one")
    model = random_model(shape_config(shape))
    found = {
        "shape": shape,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "bandwidth": stream_bandwidth(),
        "decode": [],
        "prefill": [],
    }
    print(f"{found['device']}, {found['bandwidth'] / 1e12:.2f} TB/s", flush=True)
    for cache, cells in DECODE.items():
        llms = {cache: with_any_cache(model, parse_spec(cache))}
        for measure, own in ((bench_decode, cells), (bench_prefill, PREFILL.get(cache, []))):
            name = measure.__name__.removeprefix("bench_")
            for batch, context in own:
                (step,) = measure(llms, [batch], [context])
                row = dataclasses.asdict(step)
                took = row.get("milliseconds") or row.get("tokens_per_second")
                unit = "ms" if name == "decode" else "tokens/s"
                said = "does not fit" if took is None else f"{took:,.2f} {unit}"
                print(f"{name:8} {cache:10} {batch:4} x {context:7,}: {said}", flush=True)
                found[name].append(row)
                if out is not None:
                    out.write_text(json.dumps(found, indent=1) + "\n")
                gc.collect()
        del llms


if __name__ == "__main__":
    typer.run(main)
