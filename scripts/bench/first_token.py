"""Times a process from its start to the first token of a prompt, without making the weights.

    JKVQ_CACHE=$(mktemp -d) bash -c 'for run in 1 2; do python -m scripts.bench.first_token; done'

The first run finds nothing compiled, the second what the first has kept.
"""

import os
import time
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import typer

import jkvq
from jkvq.bench.shapes import random_model, shape_config, with_any_cache
from jkvq.cache.specs.spec_text import parse_spec


def seconds_since_start() -> float:
    """Of this process, by the system's clock."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    return up - ticks / os.sysconf("SC_CLK_TCK")


def main(
    shape: Annotated[str, typer.Option(help="Whose random weights.")] = "qwen3-8b",
    cache: Annotated[str, typer.Option()] = "jkvq-int4",
    tokens: Annotated[int, typer.Option(help="Of the prompt.")] = 1024,
) -> None:
    """Prints a line."""
    imports = seconds_since_start()
    model = random_model(shape_config(shape))
    jax.block_until_ready(model.params)
    start = time.perf_counter()
    llm = with_any_cache(model, parse_spec(cache))
    prompt = np.random.default_rng(0).integers(0, model.config.vocab, tokens).tolist()
    next(iter(jkvq.stream(llm, prompt, max_new_tokens=2, ignore_eos=True)))
    rest = time.perf_counter() - start
    print(f"{imports + rest:.1f} s: imports {imports:.1f}, cache and first token {rest:.1f}")


if __name__ == "__main__":
    typer.run(main)
