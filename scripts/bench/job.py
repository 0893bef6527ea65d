"""Times a job of `jkvq batch`: how long the GPU computes, and what the host does meanwhile.

    python -m scripts.bench.job OUT/problems/gsm8k.jsonl --model M --cache jkvq-int4

The requests are those of a file that `jkvq eval tasks` or anybody wrote for `jkvq batch`. They are
answered once to compile, twice on the clock, and once more under a profiler, which makes launches
slower: what its kernels take is compared with the time of a run without it.
"""

import contextlib
import functools
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import jax
import typer

import jkvq
from jkvq.bench.split import busy_seconds, profiled
from jkvq.cache.calibrated import methods_for
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.defaults import DEFAULT_MODEL
from jkvq.engine.runner import Runner
from jkvq.llm import with_cache
from jkvq.models.model import load_model

# What the host does in each of these
_DOES = {
    (Runner, "prefill"): "launches prompts",
    (Runner, "join"): "launches prompts",
    (Runner, "burst"): "launches tokens",
    (jax, "device_get"): "waits",
}


def main(
    requests: Annotated[Path, typer.Argument(help="JSON lines, as `jkvq batch` reads them.")],
    model: Annotated[str, typer.Option()] = DEFAULT_MODEL,
    cache: Annotated[str, typer.Option()] = "jkvq-int4",
    calibration: Annotated[Path | None, typer.Option(help="What `jkvq calibrate` wrote.")] = None,
    limit: Annotated[int, typer.Option(help="Requests of the file at most.")] = 300,
    slots: Annotated[int, typer.Option(help="Answers at once.")] = 128,
) -> None:
    """Prints two lines."""
    with requests.open() as file:
        asked = [json.loads(line) for line in itertools.islice(file, limit)]
    given = calibration if methods_for(parse_spec(cache)) else None
    llm = with_cache(load_model(model), cache, given)

    def answer() -> int:
        answers = jkvq.batch(llm, asked, slots=slots)
        return sum(len(each.generation.tokens) for each in answers if each.generation)

    answer()
    runs = []
    for _ in range(2):
        with _host_clock() as seconds:
            begun = time.perf_counter()
            tokens = answer()
            runs.append((time.perf_counter() - begun, tokens, seconds))
    took, tokens, seconds = min(runs, key=lambda run: run[0])
    line = f"{cache}: {tokens:,} tokens in {took:.2f} s, {tokens / took:,.0f} a second"
    if jax.default_backend() != "cpu":
        busy = busy_seconds(profiled(answer))
        line += f"; kernels {busy:.2f} s, {busy / took:.2f} of the time"
    print(line)
    rest = {"does the rest": took - sum(seconds.values())}
    print("The host", ", ".join(f"{what} {x:.2f} s" for what, x in {**seconds, **rest}.items()))


@contextlib.contextmanager
def _host_clock() -> Iterator[dict[str, float]]:
    """Seconds by what the host does."""
    seconds: dict[str, float] = defaultdict(float)
    with contextlib.ExitStack() as stack:
        for (owner, name), what in _DOES.items():
            clocked = _clocked(getattr(owner, name), seconds, what)
            stack.enter_context(mock.patch.object(owner, name, clocked))
        yield seconds


def _clocked(call: Any, seconds: dict[str, float], what: str) -> Any:
    @functools.wraps(call)
    def clocked(*args, **kwargs):
        begun = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            seconds[what] += time.perf_counter() - begun

    return clocked


if __name__ == "__main__":
    typer.run(main)
