"""Times a job of `jkvq batch`, and for how much of it the GPU computes.

    python -m scripts.bench.job OUT/problems/gsm8k.jsonl --model M --cache bf16,jkvq-int4

The requests are those of a file that `jkvq eval tasks` or anybody wrote for `jkvq batch`. They are
answered once to compile, twice on the clock, and once more under a profiler, which makes launches
slower: what its kernels take is compared with the time of a run without it.
"""

import itertools
import json
import time
from pathlib import Path
from typing import Annotated

import jax
import typer

import jkvq
from jkvq.bench.split import busy_seconds, profiled
from jkvq.cache.calibrated import methods_for
from jkvq.cache.specs.spec_text import parse_spec, split_names
from jkvq.defaults import DEFAULT_MODEL
from jkvq.llm import with_cache
from jkvq.models.model import load_model


def main(
    requests: Annotated[Path, typer.Argument(help="JSON lines, as `jkvq batch` reads them.")],
    model: Annotated[str, typer.Option()] = DEFAULT_MODEL,
    cache: Annotated[str, typer.Option()] = "bf16,jkvq-int4",
    calibration: Annotated[Path | None, typer.Option(help="What `jkvq calibrate` wrote.")] = None,
    limit: Annotated[int, typer.Option(help="Requests of the file at most.")] = 300,
    slots: Annotated[int, typer.Option(help="Answers at once.")] = 128,
) -> None:
    """Prints a line for each cache."""
    with requests.open() as file:
        asked = [json.loads(line) for line in itertools.islice(file, limit)]
    base = load_model(model)
    for name in split_names(cache):
        given = calibration if methods_for(parse_spec(name)) else None
        llm = with_cache(base, name, given)

        def answer(llm=llm) -> int:
            answers = jkvq.batch(llm, asked, slots=slots)
            return sum(len(each.generation.tokens) for each in answers if each.generation)

        answer()
        times, tokens = [], 0
        for _ in range(2):
            begun = time.perf_counter()
            tokens = answer()
            times.append(time.perf_counter() - begun)
        rate = tokens / min(times)
        line = f"{name}: {tokens:,} tokens in {min(times):.2f} s, {rate:,.0f} a second"
        if jax.default_backend() != "cpu":
            busy = busy_seconds(profiled(answer))
            line += f"; kernels {busy:.2f} s, {busy / min(times):.2f} of the time"
        print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
