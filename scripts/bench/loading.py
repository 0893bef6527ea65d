"""Times loading a model's weights: as they come, and as `jkvq convert` writes them.

python scripts/bench/loading.py [--model smollm2-135m] [--dtype float32]
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import jax
import typer
from rich.console import Console
from rich.table import Table

from jkvq.defaults import DEFAULT_MODEL
from jkvq.models.dtype import compute_dtype
from jkvq.models.formats.checkpoint import open_checkpoint
from jkvq.models.formats.converted_folder import ConvertedFolder, write_converted

ROUNDS = 3


def seconds(load) -> float:
    """The best of a few rounds, device arrays in place."""

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(load())
        return time.perf_counter() - start

    return min(once() for _ in range(ROUNDS))


def main(
    model: str = DEFAULT_MODEL,
    dtype: Annotated[str | None, typer.Option(show_default="what is fastest here")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
):
    """Prints a table, or JSON."""
    compute, original = compute_dtype(dtype), open_checkpoint(model)
    params = original.params(compute)
    with tempfile.TemporaryDirectory() as work:
        write_converted(Path(work) / "converted", original.config, params, original.tokenizer())
        times = {
            "original": seconds(lambda: original.params(compute)),
            "converted": seconds(lambda: ConvertedFolder(Path(work) / "converted").params(compute)),
        }
    if as_json:
        print(json.dumps({"model": model, "jax": jax.__version__, "seconds": times}))
        return
    table = Table("checkpoint", "seconds", title=f"{model}, jax {jax.__version__}")
    for name, time_taken in times.items():
        table.add_row(name, f"{time_taken:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
