"""Shows what the engine promises, on a real model on this CPU: one part after the other, or some.

    python -m scripts.check_engine [texts shared static soak tick capacity]

texts     greedy texts alone, in company, after a prefix hit and after a preemption: the same bytes
shared    requests over one prefix, with the prefix cache and without
static    requests of random lengths, against static batches in the order of their arrival
soak      many requests with cancellations over half of the pages they would take
tick      the scheduler's own time with 256 running sequences
capacity  tokens that the pools of a cache hold, against bf16
"""

import argparse
import functools
import resource
import time

import jax
import numpy as np

import jkvq
from jkvq.cache.layout import pages_for, pages_of_window, stored_bytes
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.defaults import DEFAULT_MODEL
from jkvq.engine.engine import Engine
from jkvq.engine.options import Options
from jkvq.scheduling.scheduler import Limits, Scheduler
from jkvq.scheduling.sequence import Sequence

CACHES = ("bf16", "int4", "saw-int4", "jkvq-int4", "jkvq-int2")
WORDS = [
    "why",
    "is",
    "the",
    "sky",
    "blue",
    "and",
    "how",
    "do",
    "birds",
    "find",
    "their",
    "way",
    "home",
    "in",
    "winter",
    "when",
    "it",
    "snows",
    "over",
    "the",
    "old",
    "harbour",
    "town",
    "where",
    "nobody",
    "knows",
    "what",
    "a",
    "lighthouse",
    "keeper",
    "reads",
    "at",
    "night",
    "before",
    "the",
    "storm",
]


@functools.cache
def llm_of(cache: str) -> jkvq.LLM:
    """The default model with a cache, on the path that is the same everywhere."""
    return jkvq.load(DEFAULT_MODEL, cache=cache, dtype="float32", implementation="reference")


def prompts_of(llm: jkvq.LLM, lengths) -> list[list[int]]:
    """Prompts of so many tokens, made of words."""
    rng, tokens = np.random.default_rng(0), []
    for length in lengths:
        text = " ".join(rng.choice(WORDS, 2 * int(length) + 8))
        tokens.append(llm.tokenizer.encode(text)[: int(length)])
    return tokens


def check_texts(count: int = 32, new: int = 40) -> None:
    """Texts of ``count`` prompts in four situations, bit for bit.

    Pages are small, so that sequences grow into new ones and are preempted.
    """
    for cache in CACHES:
        llm = llm_of(f"{cache},page=16")
        lengths = np.random.default_rng(1).integers(250, 400, count)
        prompts = prompts_of(llm, lengths)
        options = Options(max_new_tokens=new, ignore_eos=True, seed=0)

        def texts(engine: Engine, prompts=prompts, options=options, *, one_by_one: bool = False):
            handles = []
            for prompt in prompts:
                handles.append(engine.submit_tokens(prompt, options))
                if one_by_one:
                    handles[-1].result()
                else:  # others join and leave while it runs
                    engine.step()
            return [handle.result() for handle in handles]

        engine = Engine(llm, slots=16, prefill_rows=1, prefix_cache=False)
        alone = texts(engine, one_by_one=True)
        together = texts(Engine(llm, slots=16, prefill_rows=1, prefix_cache=False))
        warm, hit = Engine(llm, slots=16, prefill_rows=1), []
        for first in range(0, count, 4):  # of prompts with windows the ends of few are kept
            own = prompts[first : first + 4]
            texts(warm, own)
            hit += texts(warm, own)
        windows = llm.spec.sink + llm.spec.recent  # of 16 bits, which take none of these pages
        packed = [max(0, len(prompt) + 8 - windows) for prompt in prompts[:8]]
        pages = sum(pages_for(tokens, llm.spec) for tokens in packed) + 8
        short = Engine(llm, slots=16, prefill_rows=1, pages=pages, prefix_cache=False)
        preempted = texts(short)
        same = [
            sum(a.tokens == b.tokens for a, b in zip(alone, other, strict=True))
            for other in (together, hit, preempted)
        ]
        cached = sum(each.cached_tokens for each in hit)
        print(
            f"{cache:10} of {count}: in company {same[0]}, after a hit {same[1]} "
            f"({cached} tokens cached), after preemptions {same[2]} "
            f"({short.stats.preemptions} of them)",
            flush=True,
        )
        assert same == [count] * 3 and cached and short.stats.preemptions


def check_shared(count: int = 200, prefix: int = 1024) -> None:
    """Requests over one prefix, each with its question; a tenth of them without the cache."""
    for cache in ("saw-int4", "jkvq-int4"):
        llm = llm_of(cache)
        shared = prompts_of(llm, [prefix])[0]
        own = prompts_of(llm, np.random.default_rng(2).integers(8, 40, count))
        options = Options(max_new_tokens=2, ignore_eos=True, seed=0)
        found = {}
        for keeps, some in ((True, own), (False, own[: count // 10])):
            engine = Engine(llm, slots=8, prefix_cache=keeps)
            for prompts in ([[*shared[::-1], *each] for each in own[:9]], own[:9]):  # compiles
                for handle in [engine.submit_tokens(prompt, options) for prompt in prompts]:
                    handle.result()
            before, start = engine.stats.prefilled_tokens, time.perf_counter()
            for handle in [engine.submit_tokens([*shared, *each], options) for each in some]:
                handle.result()
            tokens = engine.stats.prefilled_tokens - before
            found[keeps] = tokens / len(some), (time.perf_counter() - start) / len(some)
        (with_tokens, with_s), (tokens, s) = found[True], found[False]
        print(
            f"{cache:10} a request: {with_tokens:.0f} tokens prefilled of {tokens:.0f} "
            f"({with_tokens / tokens:.3f}), {with_s:.2f} s of {s:.2f} ({with_s / s:.3f})",
            flush=True,
        )


def check_static(count: int = 64, slots: int = 8) -> None:
    """Requests of random lengths through the engine, and in static batches."""
    llm, rng = llm_of("bf16"), np.random.default_rng(3)
    prompts = prompts_of(llm, rng.integers(8, 32, count))
    news = rng.integers(8, 257, count)
    options = [Options(max_new_tokens=int(n), ignore_eos=True, seed=0) for n in news]

    def clocks() -> np.ndarray:  # neighbours slow the wall's clock more than the processor's
        return np.array([time.perf_counter(), time.process_time()])

    def by_engine(count: int) -> np.ndarray:
        engine, start = Engine(llm, slots=slots), clocks()
        pairs = list(zip(prompts, options, strict=True))[:count]
        handles = [engine.submit_tokens(*pair) for pair in pairs]
        assert [len(each.result().tokens) for each in handles] == news[:count].tolist()
        return clocks() - start

    def by_batches(count: int) -> np.ndarray:
        start = clocks()
        for at in range(0, count, slots):
            some = slice(at, at + slots)
            results = jkvq.generate(llm, prompts[some], options[some])
            assert [len(each.tokens) for each in results] == news[some].tolist()
        return clocks() - start

    for run in (by_engine, by_batches):
        run(slots)  # compiles
    engine, batches = by_engine(count), by_batches(count)
    total = news.sum()
    print(
        f"{count} requests, {total} tokens: engine {total / engine[0]:.1f} tokens/s, static "
        f"batches {total / batches[0]:.1f}: {batches[0] / engine[0]:.2f} times; of processors' "
        f"time {batches[1] / engine[1]:.2f}",
        flush=True,
    )


def check_soak(count: int = 2000) -> None:
    """Many requests with cancellations, over half of the pages that they need at once."""
    llm, rng, slots = llm_of("int4"), np.random.default_rng(4), 16
    prompts = prompts_of(llm, rng.integers(4, 120, 50))
    engine = Engine(llm, slots=slots, pages=slots * pages_for(132, llm.spec) // 2)
    handles, cancelled, memory = [], 0, []
    start = time.perf_counter()
    for number in range(count):
        new = int(rng.integers(1, 12))
        options = Options(max_new_tokens=new, ignore_eos=True, seed=number)
        prompt = [*prompts[rng.integers(50)], int(rng.integers(1000))]
        handles.append((engine.submit_tokens(prompt, options), new))
        if rng.random() < 0.1:
            handles[rng.integers(len(handles))][0].cancel()
        while engine.stats.waiting > 32:
            engine.step()
        if number % 100 == 99:
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
    results = [(handle.result(), new) for handle, new in handles]
    for result, new in results:
        assert result.finish_reason in ("length", "cancelled"), result
        cancelled += result.finish_reason == "cancelled"
        assert len(result.tokens) == new or result.finish_reason == "cancelled"
    stats = engine.stats
    engine._scheduler.prefix.clear()
    left = engine.stats.pages[0], engine.stats.exact_pages[0]
    print(
        f"{count} requests in {time.perf_counter() - start:.0f} s, {cancelled} cancelled; "
        f"{stats.preemptions} preemptions, {stats.evictions} evictions; pages left {left}; "
        f"peak memory after each 100: {', '.join(f'{gb:.2f}' for gb in memory)} GB",
        flush=True,
    )


def check_tick(slots: int = 256, ticks: int = 300, steps: int = 8) -> None:
    """The scheduler's time for a tick, with bursts as an engine on a GPU has them."""
    for cache in ("bf16", "jkvq-int4"):
        spec = parse_spec(cache)
        pages, exact = 1 + slots * pages_for(16384, spec), 1 + slots * pages_of_window(spec)
        limits = Limits(slots, pages, exact, 256, (32, 128, 512, 2048), 8, 4096)
        scheduler = Scheduler(spec, limits)
        rng = np.random.default_rng(5)
        for number in range(slots):
            prompt = rng.integers(0, 1000, int(rng.integers(64, 512))).tolist()
            scheduler.submit(Sequence(number, prompt, 12_000))
        while any(each.state != "decode" for each in (*scheduler.waiting, *scheduler.running)):
            scheduler.plan(steps)
            for each in scheduler.running:
                if each.state == "decode":
                    scheduler.advance(each, each.launched - each.read)
        times, running = [], 0
        for _ in range(ticks):
            start = time.perf_counter()
            plan = scheduler.plan(steps)
            for each, _ in plan.decoding:
                scheduler.advance(each, steps)
            times.append(time.perf_counter() - start)
            running = len(plan.decoding)
        assert running == slots
        print(
            f"{cache:10} {slots} sequences: {np.median(times) * 1e3:.2f} ms a tick, "
            f"{np.quantile(times, 0.99) * 1e3:.2f} at most of 99 in 100",
            flush=True,
        )


def check_capacity(context: int = 16384) -> None:
    """Tokens that 64 GB of pools hold in sequences of this context."""
    shape, memory, held = CacheShape(36, 8, 128), 64e9, {}
    for cache in ("bf16", "jkvq-int4", "jkvq-int2"):
        spec = parse_spec(cache)
        tails = stored_bytes(spec, shape, 1, 1 + 8 * (spec.recent // spec.page))
        each = stored_bytes(spec, shape, pages_for(context, spec), pages_of_window(spec))
        held[cache] = (memory - tails) / each * context
        times = held[cache] / held["bf16"]
        print(f"{cache:10} {held[cache]:,.0f} tokens, {times:.2f} times those of bf16", flush=True)


PARTS = {
    "texts": check_texts,
    "shared": check_shared,
    "static": check_static,
    "soak": check_soak,
    "tick": check_tick,
    "capacity": check_capacity,
}


def main() -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description="Shows what the engine promises.")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parts = parser.parse_args().parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"{', '.join(unknown)}: there are {', '.join(PARTS)}")
    for part in parts:
        print(f"-- {part} ({jax.default_backend()})", flush=True)
        PARTS[part]()


if __name__ == "__main__":
    main()
