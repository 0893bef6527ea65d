"""Times an engine in steady state on this GPU against bare bursts of the same shape.

    python -m scripts.bench.engine --cache jkvq-int4 --slots 64 --tokens 8192

Random bfloat16 weights in the shape of Qwen3-8B; every sequence has a prompt of its own. Afterwards
some requests leave and others come, and nothing shall be compiled for them.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from jkvq.bench.shapes import SHAPES, random_model, with_any_cache
from jkvq.bench.steps import time_decode
from jkvq.cache.layout import pages_for
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.engine.engine import Engine
from jkvq.engine.options import Options
from jkvq.engine.writer import Handle
from jkvq.llm import LLM
from jkvq.support.compile_clock import compile_seconds

BURSTS = 32  # that are timed
ROOM = 4096  # tokens that a sequence may draw while others are read and in the bursts


class Clocked:
    """An engine's runner, with the seconds that its callers wait for a launch to return."""

    def __init__(self, runner):
        self._runner, self.seconds = runner, 0.0

    def __getattr__(self, name: str):
        method = getattr(self._runner, name)

        def clocked(*args):
            start = time.perf_counter()
            found = method(*args)
            self.seconds += time.perf_counter() - start
            return found

        return clocked


def filled(llm: LLM, slots: int, tokens: int) -> tuple[Engine, list[Handle]]:
    """An engine with all slots in decode, and its requests."""
    pages = slots * (pages_for(tokens + ROOM, llm.spec) + 1)
    engine = Engine(llm, slots=slots, pages=pages)
    handles = [submit(engine, tokens, seed) for seed in range(slots)]
    while min(handle.sequence.read for handle in handles) < 1:
        engine.step()
    return engine, handles


def submit(engine: Engine, tokens: int, seed: int) -> Handle:
    """A request with a prompt that nobody else has."""
    prompt = np.random.default_rng(seed).integers(0, 150_000, tokens).tolist()
    return engine.submit_tokens(prompt, Options(max_new_tokens=ROOM, ignore_eos=True, seed=0))


def drawn_in(engine: Engine, bursts: int) -> tuple[float, int, float]:
    """Seconds and tokens of so many ticks, and the seconds until each tick's launch returned."""
    clocked = Clocked(engine._runner)
    engine._runner = clocked  # pyright: ignore[reportAttributeAccessIssue]
    before, start = engine.stats.drawn_tokens, time.perf_counter()
    for _ in range(bursts):
        engine.step()
    seconds = time.perf_counter() - start
    engine._runner = clocked._runner
    return seconds, engine.stats.drawn_tokens - before, clocked.seconds


def main() -> None:
    """Prints milliseconds of a step in the engine and outside, and what joining compiles."""
    parser = argparse.ArgumentParser(description="Times an engine in steady state.")
    parser.add_argument("--cache", default="jkvq-int4")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, help="write JSON too")
    args = parser.parse_args()
    llm = with_any_cache(random_model(SHAPES["qwen3-8b"]), parse_spec(args.cache))
    start = time.perf_counter()
    engine, handles = filled(llm, args.slots, args.tokens)
    print(
        f"{args.slots} prompts of {args.tokens} in {time.perf_counter() - start:.1f} s", flush=True
    )
    for _ in range(2):
        engine.step()
    length = int(np.mean([handle.sequence.least for handle in handles]))
    seconds, drawn, launching = drawn_in(engine, BURSTS)
    steps = drawn / args.slots
    assert steps == BURSTS * engine._long, "some have ended"
    step = seconds / steps * 1e3
    before = compile_seconds()
    for handle in handles[:4]:
        handle.cancel()
    new = [submit(engine, args.tokens, 1000 + number) for number in range(4)]
    while min(handle.sequence.read for handle in new) < 1:
        engine.step()
    compiled = compile_seconds() - before
    del engine, handles, new
    bare = time_decode(llm, args.slots, length)[0]
    assert bare is not None
    found = {
        "mean_length": length,
        "engine_ms": step,
        "bare_ms": bare,
        "ratio": step / bare,
        "launching_ms_per_burst": launching / BURSTS * 1e3,
        "compiled_by_joins_s": compiled,
    }
    print(json.dumps(found), flush=True)
    if args.out:
        args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
