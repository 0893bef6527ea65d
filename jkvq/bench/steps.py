"""How long a model takes for a step: one token of every sequence, or the prompts of all of them.

A decode step begins behind a context that was never read: its pages hold random numbers.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jkvq.bench.split import Split, profiled, split_of
from jkvq.cache.footprint import sequence_bytes
from jkvq.cache.layout import KVCache, empty_cache, fill_table, pages_for, table_columns
from jkvq.cache.shape import CacheShape
from jkvq.engine.capacity import call_limits
from jkvq.engine.runner import Runner, nothing_known
from jkvq.engine.sampling import SamplerArrays, Sampling
from jkvq.engine.steps import Decoding, decode_burst, most_steps
from jkvq.llm import LLM
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import weight_bytes
from jkvq.scheduling.scheduler import Scheduler
from jkvq.scheduling.sequence import Sequence as Scheduled
from jkvq.support.compile_clock import compile_seconds
from jkvq.support.memory import free_bytes, ran_out
from jkvq.support.pictures import line_look, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_REPEATS = 3  # the least of which counts
_BURST = {"cpu": 4, "gpu": 32}  # steps
_AHEAD = 2  # bursts that are launched while another runs
_ROOM = 0.95  # of the free memory that a cache may take
_STREAMED = 1 << 32  # bytes
_READS = 10  # of them, one after the other: what it takes to launch one must not count
_NO_STEP, _NO_PROMPTS = (None, 0.0, None), (None, 0.0)  # where there is no room for them

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class DecodeStep:
    """A step of a batch behind contexts of some length.

    milliseconds: of the step; None where the cache does not fit.
    tokens_per_second: of all sequences.
    bytes: of weights and cache that it has to read; of experts, those that as many tokens choose
        which choose at random.
    of_bandwidth: the part of the memory's speed at which it reads them; None on a CPU, where
        no simple loop reaches that.
    over_bf16: times as fast as bf16 with the same batch and context, if that was run before.
    fits: the largest batch with such contexts that memory has room for; None on a CPU.
    compile_seconds: of its programs, before.
    split: where the time goes; None on a CPU.
    """

    cache: str
    batch: int
    context: int
    milliseconds: float | None
    tokens_per_second: float | None
    bytes: int
    of_bandwidth: float | None
    over_bf16: float | None
    fits: int | None
    compile_seconds: float
    split: Split | None


@dataclass(frozen=True)
class PrefillStep:
    """The prompts of a batch.

    tokens_per_second: of prompts; None where the cache does not fit.
    """

    cache: str
    batch: int
    context: int
    tokens_per_second: float | None
    over_bf16: float | None
    compile_seconds: float


def bench_decode(
    llms: Mapping[str, LLM], batches: Sequence[int], contexts: Sequence[int]
) -> Iterator[DecodeStep]:
    """Steps of every batch and context with every cache, as they are measured."""
    bandwidth = None if jax.default_backend() == "cpu" else stream_bandwidth()
    base: dict[tuple[int, int], float | None] = {}
    for context in contexts:
        for batch in batches:
            for name, llm in llms.items():
                size, fits = step_bytes(llm, batch, context), largest_batch(llm, context)
                ms, compiled, split = _or(_NO_STEP, time_decode, llm, batch, context)
                if name == "bf16":
                    base[batch, context] = ms
                yield DecodeStep(
                    *(name, batch, context, ms),
                    None if ms is None else batch / ms * 1e3,
                    size,
                    None if ms is None or bandwidth is None else size / ms * 1e3 / bandwidth,
                    _ratio(base.get((batch, context)), ms),
                    fits,
                    compiled,
                    split,
                )


def bench_prefill(
    llms: Mapping[str, LLM], batches: Sequence[int], contexts: Sequence[int]
) -> Iterator[PrefillStep]:
    """Prompts of every number and length with every cache, as they are measured."""
    base = {}
    for context in contexts:
        for batch in batches:
            for name, llm in llms.items():
                rate, compiled = _or(_NO_PROMPTS, time_prefill, llm, batch, context)
                if name == "bf16":
                    base[batch, context] = rate
                over = _ratio(rate, base.get((batch, context)))
                yield PrefillStep(name, batch, context, rate, over, compiled)


def _or(nothing: _Found, measure: Callable[..., _Found], *args) -> _Found:
    """What is measured, or nothing where memory ran out after all."""
    try:
        return measure(*args)
    except jax.errors.JaxRuntimeError as error:
        if not ran_out(error):
            raise
        return nothing


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def step_bytes(llm: LLM, batch: int, context: int) -> int:
    """What a decode step has to read: weights, but for rows of an embedding, and the cache."""
    embedding = llm.params["embedding"]
    weights = weight_bytes(llm.config, embedding.dtype) - _unread_experts(llm, batch)
    if not llm.config.tied:
        weights -= embedding.nbytes
    return weights + batch * sequence_bytes(llm.spec, CacheShape.of(llm.config), context)


def _unread_experts(llm: LLM, batch: int) -> int:
    """Bytes of the experts that no token of a batch chooses, on average over random choices."""
    experts = llm.config.experts
    if experts is None:
        return 0
    stacks = [layer["mlp"].get("experts") for layer in llm.params["layers"].values()]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(stacks))
    return round(size * (1 - experts.chosen / experts.number) ** batch)


def stream_bandwidth() -> float:
    """Bytes a second at which this device reads memory."""
    data = jax.random.bits(jax.random.key(0), (_STREAMED // 4,), jnp.uint32)

    @jax.jit
    def read(total, data):
        for _ in range(_READS):
            total = total + jnp.sum(data ^ total, dtype=jnp.uint32)
        return total

    total, times = jax.block_until_ready(read(jnp.uint32(0), data)), []
    for _ in range(5):
        start = time.perf_counter()
        total = jax.block_until_ready(read(total, data))
        times.append(time.perf_counter() - start)
    return _READS * data.nbytes / min(times)


def largest_batch(llm: LLM, context: int) -> int | None:
    """Sequences of so many tokens that memory has room for now; None if that is not known."""
    room = free_bytes()
    each = sequence_bytes(llm.spec, CacheShape.of(llm.config), context)
    return None if room is None else int(_ROOM * room) // each


def time_decode(llm: LLM, batch: int, context: int) -> tuple[float | None, float, Split | None]:
    """Milliseconds of a step behind so many tokens, seconds of compiling, and where the time goes.

    What some bursts add to one before them: a GPU that has nothing to do waits milliseconds for the
    first launch, and an engine launches a burst while another runs. None: there is no room.
    """
    steps = min(most_steps(llm.spec), _BURST.get(jax.default_backend(), 4))
    at_end = context + (2 + _REPEATS * (2 + _AHEAD)) * steps
    most = largest_batch(llm, at_end)
    if most is not None and batch > most:
        return _NO_STEP
    cache, state = _random_cache(llm, batch, context, at_end), _drawing(llm.config, batch)

    def burst():
        nonlocal cache, state
        cache, state, drawn = decode_burst(
            *(llm.config, llm.params, llm.basis, cache, state),
            *(np.ones(batch, bool), nothing_known(batch), steps, "greedy", llm.implementation),
        )
        return drawn

    def seconds(bursts: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready([burst() for _ in range(bursts)])
        return time.perf_counter() - start

    before = compile_seconds()
    seconds(1)
    compiled = compile_seconds() - before
    one, more = np.min([(seconds(1), seconds(1 + _AHEAD)) for _ in range(_REPEATS)], axis=0)
    ms = float(more - one) / (_AHEAD * steps) * 1e3
    split = split_of(profiled(burst), steps, ms) if jax.default_backend() == "gpu" else None
    assert state.active.all()
    return ms, compiled, split


def _random_cache(llm: LLM, batch: int, context: int, at_end: int) -> KVCache:
    """A cache whose sequences have ``context`` tokens of random numbers, and room for more."""
    pages = pages_for(at_end, llm.spec)
    own = 1 + np.arange(batch * pages).reshape(batch, pages)
    table = jnp.asarray(fill_table(llm.spec, own.tolist(), table_columns(at_end, llm.spec)))
    cache = empty_cache(llm.spec, CacheShape.of(llm.config), 1 + batch * pages, table)
    length = jnp.full(batch, context, jnp.int32)
    return dataclasses.replace(
        cache,
        groups=jax.tree.map(_random_words, cache.groups),
        sequences=dataclasses.replace(cache.sequences, length=length),
    )


def _random_words(array: jax.Array) -> jax.Array:
    """Words that are small numbers, as 16-bit floats of either kind; in place."""
    if array.dtype != jnp.uint16:
        return array
    return _fill(array)


def _fill_words(array):
    bits = jax.random.bits(jax.random.key(0), array.shape, jnp.uint16)
    bits = bits & jnp.uint16(0x03FF) | jnp.uint16(0x3000)  # small and positive in either kind
    return array & jnp.uint16(0) | bits  # what is not taken is not overwritten either


_fill = jax.jit(_fill_words, donate_argnums=0)


def _drawing(config: ModelConfig, batch: int) -> Decoding:
    """Sequences that draw, and do not end."""
    return Decoding(
        token=jnp.arange(batch, dtype=jnp.int32),
        made=jnp.zeros(batch, jnp.int32),
        budget=jnp.full(batch, 1 << 20, jnp.int32),
        active=jnp.ones(batch, bool),
        failed=jnp.zeros(batch, bool),
        seen=jnp.zeros((batch, config.vocab), bool),
        stop_tokens=jnp.full((batch, 8), -1, jnp.int32),
        sampler=jax.device_put(SamplerArrays.stack([Sampling()] * batch)),
    )


def time_prefill(llm: LLM, batch: int, context: int) -> tuple[float | None, float]:
    """Tokens of prompts a second, and the seconds that their programs compiled for.

    None: there is no room.
    """
    most = largest_batch(llm, context)
    if most is not None and batch > most:
        return _NO_PROMPTS
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, llm.config.vocab, (batch, context)).tolist()
    best, before, compiled = np.inf, compile_seconds(), 0.0
    for repeat in range(3):
        start = time.perf_counter()
        jax.block_until_ready(_prefill(llm, prompts))
        if repeat:
            best = min(best, time.perf_counter() - start)
        else:
            compiled = compile_seconds() - before
    return batch * context / best, compiled


def _prefill(llm: LLM, prompts: list[list[int]]) -> jax.Array:
    """The hidden state of the last prompt's last token, when all are stored."""
    limits = call_limits(llm, [len(prompt) + 1 for prompt in prompts])
    window, runner = CacheShape.of(llm.config).window, Runner(llm, limits)
    scheduler = Scheduler(llm.spec, limits, window=window, prefix_cache=False)
    for number, prompt in enumerate(prompts):
        scheduler.submit(Scheduled(number, prompt, 1))
    hidden = None
    while any(each.state != "decode" for each in (*scheduler.waiting, *scheduler.running)):
        for group in scheduler.plan(1).groups:
            width = scheduler.width(group[0].end - group[0].start)
            hidden, _ = runner.prefill(group, width)
    assert hidden is not None
    return hidden


def steps_figure(found: Sequence[DecodeStep] | Sequence[PrefillStep], title: str) -> "Figure":
    """Tokens per second by batch, for each context; then the gain over bf16, by context.

    A single batch has the gain alone.
    """
    contexts = sorted({each.context for each in found})
    batches = sorted({each.batch for each in found})
    gains = len(contexts) > 1 and any(x.over_bf16 is not None for x in found)
    by_batch = [] if gains and len(batches) == 1 else contexts
    figure = new_figure(4.5 * (len(by_batch) + gains), 3.6, title)
    panels: Any = figure.subplots(1, len(by_batch) + gains, squeeze=False)[0]
    for panel, context in zip(panels, by_batch, strict=False):
        own = [x for x in found if x.context == context]
        _lines(panel, own, lambda x: (x.batch, x.tokens_per_second), batches)
        panel.set(title=f"{context:,} tokens each", xlabel="batch", ylabel="tokens a second")
    if gains:
        own = [x for x in found if x.batch == batches[-1]]
        _lines(panels[-1], own, lambda x: (x.context, x.over_bf16), contexts)
        panels[-1].set(title=f"batch {batches[-1]}", xlabel="tokens", ylabel="times bf16's speed")
    panels[0].legend()
    return figure


def _lines(panel, found: Sequence[Any], point, ticks: list[int]) -> None:
    """A line for each cache, of its points."""
    for index, name in enumerate(dict.fromkeys(each.cache for each in found)):
        line = [point(each) for each in found if each.cache == name]
        line = [(x, y) for x, y in line if y is not None]
        if line:
            panel.plot(*zip(*line, strict=True), marker="o", label=name, **line_look(index))
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
