"""From prompts to text."""

import dataclasses
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from jkvq.cache.page_pool import power_of_two
from jkvq.engine.batch import Batch
from jkvq.engine.detokenize import TextStream
from jkvq.engine.prompt import Prompt, as_batch, encode_prompt
from jkvq.engine.sampling import SamplerArrays, Sampling
from jkvq.engine.steps import BURST, Decoding, Drawn, decode_burst, draw_token, prepare_burst
from jkvq.llm import LLM
from jkvq.support.compile_clock import Compiling, compiling
from jkvq.support.errors import UserError, nearest

FinishReason = Literal["stop", "length", "error"]

_STREAM_BURST = 8  # tokens per launch while somebody watches a GPU; a CPU launches each anyway


@dataclass(frozen=True)
class Options:
    """What `generate` and `stream` take.

    max_new_tokens: at most so many; the model's context may end the text earlier.
    temperature, top_k, top_p, min_p, repetition_penalty: see `jkvq.sampling.Sampling`.
    seed: one for all prompts or one each; None draws a new one for each. A prompt with a seed gives
        the same text whatever else is in the batch.
    stop: strings that end the text; they are not part of it.
    stop_tokens: tokens that end it, besides the model's own.
    ignore_eos: go on past the model's own stop tokens.
    chat: wrap text in the model's chat template; None does so if the model has one.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | Sequence[int] | None = None
    stop: str | Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    ignore_eos: bool = False
    chat: bool | None = None

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens={self.max_new_tokens}: at least 1 is needed")

    @classmethod
    def read(cls, options: dict[str, Any]) -> "Options":
        names = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in names:
                raise UserError(f"generate has no option '{name}': {nearest(name, names)}")
        return cls(**options)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampling(self, prompts: int) -> list[Sampling]:
        """The rules of each prompt."""
        if self.seed is None:
            seeds = [secrets.randbits(32) for _ in range(prompts)]
        elif isinstance(self.seed, Sequence | np.ndarray):
            seeds = list(self.seed)
        else:
            seeds = [self.seed] * prompts
        if len(seeds) != prompts:
            raise UserError(f"{len(seeds)} seeds for {prompts} prompts: give one, or one each")
        return [
            Sampling(
                self.repetition_penalty,
                self.temperature,
                self.top_k,
                self.top_p,
                self.min_p,
                seed,
            )
            for seed in seeds
        ]


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of the whole batch.

    compile, fetch: of programs that were compiled, and of those that an earlier process had kept;
        neither is part of the other figures.
    """

    prefill: float
    decode: float
    compile: float
    fetch: float


@dataclass(frozen=True)
class Generation:
    """What came of one prompt.

    tokens: all that were drawn, the stop token among them.
    logprobs: of each token, under the model's own distribution.
    error: what ended it, if its finish_reason is "error"; other prompts go on.
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    prompt_tokens: int
    seed: int
    timings: Timings
    error: str | None = None


@dataclass(frozen=True)
class Piece:
    """New text of one prompt of a stream; the last one brings the whole `Generation`."""

    index: int  # which prompt
    text: str
    generation: Generation | None = None


@overload
def generate(
    llm: LLM, prompts: str | list[int] | list[dict[str, str]], **options: Any
) -> Generation: ...
@overload
def generate(
    llm: LLM, prompts: list[str] | list[list[int]] | list[list[dict[str, str]]], **options: Any
) -> list[Generation]: ...
@overload
def generate(llm: LLM, prompts: Sequence[Any], **options: Any) -> Generation | list[Generation]: ...
def generate(llm: LLM, prompts, **options: Any) -> Generation | list[Generation]:
    """Writes on from each prompt.

    Args:
        llm: from `jkvq.load`.
        prompts: text, a conversation (messages with role and content) or tokens; or a list of
            these, which run together as one batch.
        **options: the fields of `jkvq.Options`, such as max_new_tokens=64 or temperature=0.7.

    Returns:
        A `Generation`, or a list of them for a list of prompts. A prompt of a list that fails has
        an ``error``; a single one raises it.
    """
    batch, single = as_batch(prompts)
    done: dict[int, Generation] = {}
    for piece in _run(llm, batch, Options.read(options), BURST):
        if piece.generation is not None:
            done[piece.index] = piece.generation
    results = [done[index] for index in range(len(batch))]
    if not single:
        return results
    if results[0].error is not None:
        raise UserError(results[0].error)
    return results[0]


def stream(llm: LLM, prompts: Prompt | Sequence[Prompt], **options: Any) -> Iterator[Piece]:
    """Like `generate`, but gives each prompt's text in pieces, as it is written."""
    batch, _ = as_batch(prompts)
    burst = 1 if jax.default_backend() == "cpu" else _STREAM_BURST
    return _run(llm, batch, Options.read(options), burst)


def _run(llm: LLM, prompts: Sequence[Prompt], options: Options, burst: int) -> Iterator[Piece]:
    """Checks everything that can be checked, then returns the iterator that does the work."""
    tokens = [encode_prompt(llm, prompt, options.chat) for prompt in prompts]
    rules = options.sampling(len(prompts))
    budgets = [min(options.max_new_tokens, llm.config.context - len(row)) for row in tokens]
    return _pieces(llm, tokens, budgets, rules, Batch(llm, tokens, budgets), options, burst)


def _pieces(llm, tokens, budgets, rules, batch: "Batch", options: Options, burst: int):
    clock = _Clock()
    hidden = batch.prefill(llm, tokens)
    state = _initial_state(llm, tokens, budgets, rules, options, batch.rows)
    state, drawn = draw_token(llm.config, llm.params, hidden, state)
    cache = batch.cache
    if max(budgets) > 1:
        run = llm.config, llm.params, llm.basis
        cache, state = prepare_burst(*run, cache, state, llm.implementation)
    writers = [_Writer(TextStream(llm.tokenizer, options.stop_strings), len(row)) for row in tokens]
    while True:
        host: tuple[Decoding, Drawn] = jax.device_get((_light(state), drawn))
        clock.mark_prefill()
        for index, writer in enumerate(writers):
            if writer.done:
                continue
            text = writer.take(host[0], host[1], index)
            generation = writer.result(rules[index].seed, clock) if writer.done else None
            if text or generation:
                yield Piece(index, text, generation)
        if all(writer.done for writer in writers):
            return
        # A stop string is only seen here: tell the device.
        going = np.zeros(batch.rows, bool)
        going[: len(writers)] = [not writer.done for writer in writers]
        state = dataclasses.replace(state, active=jnp.asarray(going))
        cache, state, drawn = decode_burst(
            llm.config, llm.params, llm.basis, cache, state, burst, llm.implementation
        )


class _Clock:
    """Seconds since its making, split into prefill, decode and what programs took."""

    def __init__(self):
        self._start, self._first = self._now(), None

    @staticmethod
    def _now() -> tuple[float, Compiling]:
        return time.perf_counter(), compiling()

    def mark_prefill(self) -> None:
        if self._first is None:
            self._first = self._now()

    def timings(self) -> Timings:
        (start, before), (now, after) = self._start, self._now()
        first, between = self._first or (now, after)
        return Timings(
            prefill=first - start - (sum(between) - sum(before)),
            decode=now - first - (sum(after) - sum(between)),
            compile=after.compile - before.compile,
            fetch=after.fetch - before.fetch,
        )


class _Writer:
    """Collects what is drawn for one prompt."""

    def __init__(self, text: TextStream, prompt_tokens: int):
        self._stream, self._prompt_tokens = text, prompt_tokens
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._reason: FinishReason = "length"
        self._error: str | None = None
        self.done = False

    def take(self, state: Decoding, drawn: Drawn, row: int) -> str:
        """Takes a burst's tokens of this row, and returns the text that they make certain."""
        failed = bool(state.failed[row])
        # What was drawn from scores that are not numbers is no token.
        new = int(state.made[row]) - failed - len(self._tokens)
        stops = set(state.stop_tokens.tolist())
        for token, logprob in zip(
            drawn.tokens[row, :new].tolist(), drawn.logprobs[row, :new].tolist(), strict=True
        ):
            self._tokens.append(token)
            self._logprobs.append(logprob)
            if token in stops:
                self._reason = "stop"
                break
            self._stream.add(token)
            if self._stream.stopped:
                self._reason = "stop"
                break
        if failed and self._reason == "length":
            self._reason = "error"
            self._error = (
                f"the model's scores for token {int(state.made[row])} of prompt {row} are not "
                "numbers (NaN): its weights are damaged, or the dtype is too narrow for them"
            )
        self.done = self._reason != "length" or not bool(state.active[row])
        self._text.append(self._stream.finish() if self.done else self._stream.take())
        return self._text[-1]

    def result(self, seed: int, clock: _Clock) -> Generation:
        return Generation(
            "".join(self._text),
            self._tokens,
            self._logprobs,
            self._reason,
            self._prompt_tokens,
            seed,
            clock.timings(),
            self._error,
        )


def _initial_state(llm, tokens, budgets, rules, options: Options, rows: int) -> Decoding:
    stops = set(options.stop_tokens)
    if not options.ignore_eos:
        stops |= llm.tokenizer.stop_tokens
    padded_stops = np.full(power_of_two(len(stops), 8), -1, np.int32)
    padded_stops[: len(stops)] = sorted(stops)
    seen = np.zeros((rows, llm.config.vocab), bool)
    for row, prompt in enumerate(tokens):
        seen[row, prompt] = True
    padding = rows - len(tokens)
    # Made by numpy: every small array that JAX makes is a program to compile.
    return Decoding(
        token=jnp.asarray(np.zeros(rows, np.int32)),
        made=jnp.asarray(np.zeros(rows, np.int32)),
        budget=jnp.asarray(np.asarray([*budgets, *[0] * padding], np.int32)),
        active=jnp.asarray(np.arange(rows) < len(tokens)),
        failed=jnp.asarray(np.zeros(rows, bool)),
        seen=jnp.asarray(seen),
        stop_tokens=jnp.asarray(padded_stops),
        sampler=SamplerArrays.stack([*rules, *[Sampling()] * padding]),
    )


def _light(state: Decoding) -> Decoding:
    """The state without the large array that the host has no use for."""
    return dataclasses.replace(state, seen=None)  # pyright: ignore[reportArgumentType]
