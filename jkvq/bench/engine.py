"""How fast an engine is: the same requests one call after the other, in static batches, at once."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from jkvq.calibration.prose import default_text
from jkvq.engine.capacity import call_limits, pools_bytes
from jkvq.engine.engine import Engine
from jkvq.engine.generate import generate
from jkvq.engine.options import Options
from jkvq.engine.writer import Generation
from jkvq.llm import LLM
from jkvq.models.model import Model
from jkvq.support.arguments import INT32, whole
from jkvq.support.compile_clock import compiling
from jkvq.support.errors import UserError
from jkvq.support.pictures import line_look, new_figure
from jkvq.support.progress import count_bar, note

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Way = Literal["one call after the other", "static batches", "engine"]
_CALLS: Way = "one call after the other"
_BATCHES: Way = "static batches"
_ENGINE: Way = "engine"
_TEXT = 200_000  # characters that prompts are taken from
_WARM_TOKENS = 8  # of each answer, while programs are compiled
FEWEST = 4  # requests of a load


@dataclass(frozen=True)
class Workload:
    """Random requests, which are all there at once; checked when it is made.

    requests: how many.
    prompt_tokens, new_tokens: of each prompt and answer, from the first number to the second.
    shared_prefix: tokens that all prompts begin with, besides their own.
    seed: of the lengths and of what the prompts say.
    """

    requests: int = 32
    prompt_tokens: tuple[int, int] = (16, 128)
    new_tokens: tuple[int, int] = (8, 64)
    shared_prefix: int = 0
    seed: int = 0

    def __post_init__(self):
        whole("requests", self.requests, 1, INT32, "a whole number, 1 or more")
        whole("shared_prefix", self.shared_prefix, 0, INT32, "a whole number, 0 or more")
        whole("seed", self.seed, 0, 2**64 - 1, "a whole number from 0 to 2**64 - 1")
        for name in ("prompt_tokens", "new_tokens"):
            least, most = getattr(self, name)
            if not 1 <= least <= most <= INT32:
                raise UserError(f"{name}={least}:{most}: from 1 up, the smaller number first")


class Request(NamedTuple):
    """A prompt, and how many tokens its answer has."""

    prompt: list[int]
    new_tokens: int


class Spread(NamedTuple):
    """Seconds: of half the requests at most, and of 95 in a hundred."""

    median: float
    p95: float


@dataclass(frozen=True)
class Measured:
    """What one way of running the requests has taken.

    concurrency: sequences that run at once.
    tokens: of all answers.
    over_calls, over_batches: its tokens per second over those of one call after the other, and
        over those of static batches of as many; None where those were not run.
    first_token: seconds from when all requests were there to a request's first token.
    between_tokens: seconds from a request's token to its next, in the mean of that request.
    prefilled_tokens, cached_tokens: of prompts: those that were computed, and those that another
        had stored before.
    pool_bytes: of the largest cache.
    """

    cache: str
    way: Way
    concurrency: int
    seconds: float
    tokens: int
    tokens_per_second: float
    over_calls: float | None
    over_batches: float | None
    first_token: Spread
    between_tokens: Spread
    prefilled_tokens: int
    cached_tokens: int
    pool_bytes: int
    preemptions: int


class _Run(NamedTuple):
    """A way that was measured once: its seconds, and when each answer began."""

    seconds: float
    results: list[Generation]
    first_token: list[float]
    pool_bytes: int
    preemptions: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(each.tokens) for each in self.results)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def draw_requests(model: Model, load: Workload) -> list[Request]:
    """Requests for a model; their prompts are pieces of English prose."""
    longest = load.shared_prefix + load.prompt_tokens[1]
    if longest + load.new_tokens[1] > model.config.context:
        raise UserError(
            f"prompts of up to {longest} tokens with answers of up to {load.new_tokens[1]} are "
            f"longer than the model's context of {model.config.context}: shorten one of them"
        )
    rng = np.random.default_rng(load.seed)
    text = model.tokenizer.encode(default_text()[:_TEXT])

    def piece(tokens: int) -> list[int]:
        start = int(rng.integers(len(text)))
        return [text[(start + i) % len(text)] for i in range(tokens)]

    def request() -> Request:
        prompt, new = (
            int(rng.integers(*each, endpoint=True))
            for each in (load.prompt_tokens, load.new_tokens)
        )
        return Request(shared + piece(prompt), new)

    shared = piece(load.shared_prefix)
    return [request() for _ in range(load.requests)]


def bench_engine(
    llms: Mapping[str, LLM], requests: Sequence[Request], concurrency: Sequence[int]
) -> list[Measured]:
    """Runs the requests in every way: for each cache, and each number of sequences at once.

    Every way is run first with short answers, so that its programs are there; what is compiled
    later all the same is not counted.
    """
    several = sum(count > 1 for count in concurrency)
    runs = len(llms) * (1 + several + len(concurrency))
    found: list[Measured] = []
    with count_bar("Running requests", 2 * runs * len(requests)) as bar:
        for cache, llm in llms.items():
            calls = _warm(_in_calls, llm, requests, 1, bar.advance)
            found.append(_measured(cache, _CALLS, 1, calls, calls, None))
            for count in concurrency:
                batches = calls
                if count > 1:
                    batches = _warm(_in_calls, llm, requests, count, bar.advance)
                    found.append(_measured(cache, _BATCHES, count, batches, calls, batches))
                engine = _warm(_in_engine, llm, requests, count, bar.advance)
                found.append(_measured(cache, _ENGINE, count, engine, calls, batches))
    return found


def bench_loads(
    llms: Mapping[str, LLM], requests: Sequence[Request], concurrency: Sequence[int]
) -> list[Measured]:
    """The engine alone, with as many of the requests as run at once: those are to be enough."""
    loads = [requests[: max(count, FEWEST)] for count in concurrency]
    found: list[Measured] = []
    with count_bar("Running requests", len(llms) * sum(map(len, loads))) as bar:
        for cache, llm in llms.items():
            for count, load in zip(concurrency, loads, strict=True):
                _in_engine(llm, _short(load[:FEWEST]), count, lambda _: None)
                run = _in_engine(llm, load, count, bar.advance)
                found.append(_measured(cache, _ENGINE, count, run, None, None))
    return found


_Advance = Callable[[int], None]
_Runs = Callable[[LLM, Sequence[Request], int, _Advance], _Run]


def _warm(
    run: _Runs, llm: LLM, requests: Sequence[Request], concurrency: int, advance: _Advance
) -> _Run:
    """A run after one with short answers."""
    run(llm, _short(requests), concurrency, advance)
    return run(llm, requests, concurrency, advance)


def _short(requests: Sequence[Request]) -> list[Request]:
    return [each._replace(new_tokens=min(each.new_tokens, _WARM_TOKENS)) for each in requests]


def _now() -> float:
    """Seconds on a clock that stands still during compilation."""
    return time.perf_counter() - sum(compiling())


def _in_calls(llm: LLM, requests: Sequence[Request], concurrency: int, advance: _Advance) -> _Run:
    """A call for each group of as many requests, in the order of their arrival."""
    groups = [requests[at : at + concurrency] for at in range(0, len(requests), concurrency)]
    results: list[Generation] = []
    first: list[float] = []
    begin = _now()
    for group in groups:
        waited = _now() - begin
        done = generate(llm, [each.prompt for each in group], [_options(each) for each in group])
        results += done
        first += [waited + each.timings.prefill for each in done]
        advance(len(group))
    seconds = _now() - begin
    return _Run(seconds, results, first, max(_pool_bytes(llm, group) for group in groups))


def _pool_bytes(llm: LLM, group: Sequence[Request]) -> int:
    """Of the call that runs a group."""
    return pools_bytes(
        llm, call_limits(llm, [len(each.prompt) + each.new_tokens for each in group])
    )


def _in_engine(llm: LLM, requests: Sequence[Request], concurrency: int, advance: _Advance) -> _Run:
    """All of them submitted at once to an engine with as many slots."""
    gc.collect()  # an engine takes most of the memory that is free: none may be left of another
    engine, begin = Engine(llm, slots=concurrency), _now()
    handles = [engine.submit(each.prompt, _options(each)) for each in requests]
    results: dict[int, Generation] = {}
    while len(results) < len(handles):
        for handle in engine.step():
            if handle.done and handle.number not in results:
                results[handle.number] = handle.result()
                advance(1)
    seconds, stats = _now() - begin, engine.stats
    done = [results[handle.number] for handle in handles]
    first = [each.timings.prefill for each in done]
    return _Run(seconds, done, first, stats.pool_bytes, stats.preemptions)


def _options(request: Request) -> Options:
    return Options(max_new_tokens=request.new_tokens, ignore_eos=True, seed=0)


def _measured(
    cache: str, way: Way, concurrency: int, run: _Run, calls: _Run | None, batches: _Run | None
) -> Measured:
    for each in run.results:
        if each.error is not None:
            raise UserError(f"{cache}: {each.error}")
    note(f"{cache}, {way}, {concurrency} at once: {run.rate:,.1f} tokens/s")
    between = [
        each.timings.decode / (len(each.tokens) - 1) for each in run.results if len(each.tokens) > 1
    ]
    cached = sum(each.cached_tokens for each in run.results)
    return Measured(
        cache=cache,
        way=way,
        concurrency=concurrency,
        seconds=run.seconds,
        tokens=run.tokens,
        tokens_per_second=run.rate,
        over_calls=None if calls is None else run.rate / calls.rate,
        over_batches=None if batches is None else run.rate / batches.rate,
        first_token=_spread(run.first_token),
        between_tokens=_spread(between or [0.0]),
        prefilled_tokens=sum(each.prompt_tokens for each in run.results) - cached,
        cached_tokens=cached,
        pool_bytes=run.pool_bytes,
        preemptions=run.preemptions,
    )


def _spread(seconds: Sequence[float]) -> Spread:
    return Spread(*(float(part) for part in np.percentile(seconds, [50, 95])))


def engine_figure(found: Sequence[Measured], title: str) -> "Figure":
    """Throughput by sequences at once: a line of each way for each cache."""
    figure = new_figure(9, 6, f"{title}\nTokens per second of all requests: higher is better")
    axes = figure.subplots()
    counts = sorted({each.concurrency for each in found if each.way == _ENGINE})
    for index, cache in enumerate(dict.fromkeys(each.cache for each in found)):
        colour = line_look(index)["color"]
        for way, style in ((_ENGINE, "-"), (_BATCHES, "--"), (_CALLS, ":")):
            rows = [each for each in found if (each.cache, each.way) == (cache, way)]
            rates = {each.concurrency: each.tokens_per_second for each in rows}
            if not rates:
                continue
            if way == _CALLS:  # it is the same whatever the others do
                rates = dict.fromkeys(counts, rates[1])
            drawn = axes.plot(list(rates), list(rates.values()), marker=".", color=colour)
            drawn[0].set(label=f"{cache}: {way}", linestyle=style)
    axes.set_xlabel("sequences at once")
    axes.set_xticks(counts)
    axes.set_ylabel("tokens per second")
    axes.set_ylim(0, 1.05 * max(each.tokens_per_second for each in found))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    return figure
