"""Compares a server over HTTP with its own engine, on this device, under the same load.

    python -m scripts.bench.serving --concurrency 1,16,64,128 --prompt 8192 --new 256 --out s.json

Random bfloat16 weights in the shape of Qwen3-8B, whose every token is some text and none ends an
answer. One server, whose engine is asked directly first and then, by the client of `jkvq bench
serve` in a process of its own, over loopback. Requests come at once, as many as the concurrency
says and a few one after the other where that is little; all prompts differ from their beginning.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax

from jkvq.bench.serving.client import Timed, connected
from jkvq.bench.serving.measure import Measured, send_all, summary
from jkvq.bench.serving.traffic import Load, Prompts, Scenario
from jkvq.bench.shapes import SHAPES, RandomWords, random_model, with_any_cache
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.cli.engine.bench import counts
from jkvq.engine.engine import Engine
from jkvq.engine.options import Options
from jkvq.engine.writer import Handle
from jkvq.server.server import Server, bind
from jkvq.support.compile_clock import compile_seconds
from jkvq.support.errors import UserError
from jkvq.version import VERSION

FEWEST = 5  # requests of a load
WARM = 3  # requests: one prompt alone and two in one program
TINY = dataclasses.replace(
    SHAPES["qwen3-4b"],
    **{"layers": 2, "width": 64, "mlp_width": 96, "heads": 4, "kv_heads": 2, "head_dim": 32},
    **{"vocab": 512, "context": 4096, "rope_divisors": (1.0,) * 16},
)


def through_engine(engine: Engine, load: Load, texts: list[str]) -> list[Timed]:
    """The requests of a load, by whoever has the engine at hand."""
    options = Options(max_new_tokens=load.scenario.answer, ignore_eos=True, chat=False, seed=0)
    going: dict[int, tuple[Handle, float]] = {}
    first: dict[int, float] = {}
    done: list[Timed] = []
    while texts or going:
        while texts and len(going) < load.clients:
            submitted = time.perf_counter()
            handle = engine.submit(texts.pop(0), options)
            handle.watched = True  # as a stream is
            going[handle.number] = handle, submitted
        changed, now = engine.step(), time.perf_counter()
        for number in {handle.number for handle in changed}:
            handle, submitted = going[number]
            first.setdefault(number, now)
            if handle.done:
                del going[number]
                result = handle.result()
                counts = len(result.tokens), result.prompt_tokens, result.cached_tokens
                done.append(Timed(submitted, first[number], now, *counts, error=result.error))
    return done


def through_http(url: str, load: Load, texts: list[str]) -> list[Timed]:
    """The requests of a load, by a client of the server."""

    async def send() -> list[Timed]:
        async with connected(url, None, None) as client:
            return await send_all(client, load, iter(texts), lambda _: None)

    return asyncio.run(send())


@contextmanager
def serving(server: Server, url: str) -> Iterator[ProcessPoolExecutor]:
    """Lets a server run in a thread; the context is a process for its clients."""
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    print(f"serving at {url}", flush=True)
    os.environ["JAX_PLATFORMS"] = "cpu"  # of that process: this one has its device
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as clients:
            yield clients
    finally:
        server.end()
        thread.join()


class Bench:
    """Runs loads in both ways; no two of them have a prompt in common."""

    def __init__(self, server: Server, url: str, clients: ProcessPoolExecutor):
        self._engine, self._url, self._clients = server.driver.engine, url, clients
        self._prompts, self._runs = Prompts(RandomWords.LETTERS, "bench"), 0

    def measure(self, load: Load) -> dict[str, Any]:
        """What a load takes by the engine and by HTTP, and what was compiled meanwhile."""
        before, compiled = self._engine.stats, compile_seconds()
        direct = summary("engine", load, through_engine(self._engine, load, self._texts(load)))
        asked = self._clients.submit(through_http, self._url, load, self._texts(load))
        http = summary("http", load, asked.result())
        after = self._engine.stats
        return {
            "concurrency": load.clients,
            "requests": load.requests,
            "system_ratio": http.system_rate / direct.system_rate,
            "ttft_p50_more_ms": (http.ttft.p50 - direct.ttft.p50) * 1e3,
            "engine": _figures(direct),
            "http": _figures(http),
            "compiled_s": compile_seconds() - compiled,
            "cached_tokens": after.cached_tokens - before.cached_tokens,
            "preemptions": after.preemptions - before.preemptions,
        }

    def _texts(self, load: Load) -> list[str]:
        self._runs += 1
        return list(islice(self._prompts.of(load, self._runs), load.requests))


def _figures(found: Measured) -> dict[str, Any]:
    assert found.whole_answers and not found.failed, found.error
    times = {name: getattr(found, name)._asdict() for name in ("ttft", "tpot", "e2e")}
    return {
        "system_rate": found.system_rate,
        "seconds": found.seconds,
        "prompt_tokens": found.prompt_tokens,
        **times,
    }


def show(row: dict[str, Any]) -> None:
    """A line of the table."""
    both = [row["engine"], row["http"]]
    rates = " ".join(f"{each['system_rate']:10.1f}" for each in both)
    first = " ".join(f"{each['ttft']['p50'] * 1e3:10.1f}" for each in both)
    between = " ".join(f"{each['tpot']['p50'] * 1e3:7.2f}" for each in both)
    print(
        f"{row['concurrency']:11} {rates} {row['system_ratio']:6.3f} {first} "
        f"{row['ttft_p50_more_ms']:+7.1f} {between} {row['compiled_s']:8.1f} "
        f"{row['cached_tokens']:6} {row['preemptions']:9}",
        flush=True,
    )


def main() -> None:
    """Prints tokens per second and the time to the first token of both ways."""
    parser = argparse.ArgumentParser(description="Compares a server with its own engine.")
    parser.add_argument("--cache", default="jkvq-int4")
    parser.add_argument("--concurrency", default="1,16,64,128")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens")
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--memory", type=float, default=0.8, help="of the free, for the pools")
    parser.add_argument("--tiny", action="store_true", help="a shape to try this on a CPU")
    parser.add_argument("--out", type=Path, help="write JSON too")
    args = parser.parse_args()
    try:
        levels = counts("concurrency", args.concurrency, 4096)
    except UserError as error:
        parser.error(str(error))
    scenario, start = Scenario(args.prompt, args.new), time.perf_counter()

    def load(level: int, requests: int) -> Load:
        return Load(scenario, "closed", level, 0.0, requests)

    config = TINY if args.tiny else SHAPES["qwen3-8b"]
    llm = with_any_cache(random_model(config), parse_spec(args.cache))
    place = bind("127.0.0.1", 0)
    slots = max(*levels, WARM)
    server = Server(llm, place, name="random", memory=args.memory, slots=slots)
    url = f"http://127.0.0.1:{place.getsockname()[1]}"
    device = jax.devices()[0].device_kind
    found = {"device": device, "jax": jax.__version__, "jkvq": VERSION, "cache": args.cache}
    rows: list[dict[str, Any]] = []
    with serving(server, url) as clients:
        bench = Bench(server, url, clients)
        bench.measure(load(WARM, WARM))
        print(f"{device}, {args.cache}, {scenario}: warm after {time.perf_counter() - start:.0f} s")
        print("            tokens/s of the system        TTFT p50, ms                TPOT p50, ms")
        print(
            "concurrency     engine       http  ratio     engine       http    more  engine    http"
            " compiled cached preempted",
            flush=True,
        )
        for level in levels:
            try:
                rows.append(bench.measure(load(level, max(level, FEWEST))))
                show(rows[-1])
            except Exception:
                traceback.print_exc()
            if args.out:
                args.out.write_text(json.dumps({**found, "scenario": str(scenario), "rows": rows}))


if __name__ == "__main__":
    main()
