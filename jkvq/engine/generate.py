"""From prompts to text."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import jax
import numpy as np

from jkvq.cache.page_pool import power_of_two
from jkvq.engine.batch import Batch
from jkvq.engine.detokenize import TextStream
from jkvq.engine.options import Options, options_by_prompt
from jkvq.engine.prompt import Prompt, as_batch, encode_prompt
from jkvq.engine.sampling import SamplerArrays, Sampling
from jkvq.engine.steps import BURST, Decoding, Drawn, decode_burst, draw_token, prepare_burst
from jkvq.llm import LLM
from jkvq.support.arguments import shown
from jkvq.support.compile_clock import Compiling, compiling
from jkvq.support.errors import UserError
from jkvq.support.progress import note

FinishReason = Literal["stop", "length", "error"]

_STREAM_BURST = 8  # tokens per launch while somebody watches a GPU; a CPU launches each anyway


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
    seed: gives this prompt the same text alone or in any list.
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


_Asked = Options | Sequence[Options] | None


@overload
def generate(
    llm: LLM,
    prompts: str | list[int] | list[dict[str, str]],
    options: _Asked = None,
    **changes: Any,
) -> Generation: ...
@overload
def generate(
    llm: LLM,
    prompts: list[str] | list[list[int]] | list[list[dict[str, str]]],
    options: _Asked = None,
    **changes: Any,
) -> list[Generation]: ...
@overload
def generate(
    llm: LLM, prompts: Sequence[Any], options: _Asked = None, **changes: Any
) -> Generation | list[Generation]: ...
def generate(
    llm: LLM, prompts, options: _Asked = None, **changes: Any
) -> Generation | list[Generation]:
    """Writes on from each prompt.

    Args:
        llm: from `jkvq.load`.
        prompts: text, a conversation (messages with role and content) or tokens; or a list of
            these, which run together as one batch.
        options: for all prompts, or a list with one for each; None is `jkvq.Options()`.
        **changes: fields of `jkvq.Options` that take the place of theirs, such as
            max_new_tokens=64 or temperature=0.7; seed may be a list, one for each prompt.

    Returns:
        A `Generation`, or a list of them for a list of prompts. A prompt of a list that fails has
        an ``error``; a single one raises it.
    """
    batch, single = as_batch(prompts)
    done: dict[int, Generation] = {}
    for piece in _run(llm, batch, options_by_prompt(options, changes, len(batch)), BURST):
        if piece.generation is not None:
            done[piece.index] = piece.generation
    results = [done[index] for index in range(len(batch))]
    if not single:
        return results
    if results[0].error is not None:
        raise UserError(results[0].error)
    return results[0]


def stream(
    llm: LLM, prompts: Prompt | Sequence[Prompt], options: _Asked = None, **changes: Any
) -> Iterator[Piece]:
    """Like `generate`, but gives each prompt's text in pieces, as it is written."""
    batch, _ = as_batch(prompts)
    burst = 1 if jax.default_backend() == "cpu" else _STREAM_BURST
    return _run(llm, batch, options_by_prompt(options, changes, len(batch)), burst)


def _run(
    llm: LLM, prompts: Sequence[Prompt], options: list[Options], burst: int
) -> Iterator[Piece]:
    """Checks everything that can be checked, then returns the iterator that does the work."""
    if not isinstance(llm, LLM):
        raise UserError(f"{shown(llm)} cannot generate: give what jkvq.load returns")
    tokens = [
        encode_prompt(llm, prompt, each.chat) for prompt, each in zip(prompts, options, strict=True)
    ]
    stops = [_stop_tokens(llm, each) for each in options]
    budgets = _budgets(llm.config.context, tokens, options)
    return _pieces(llm, tokens, budgets, stops, Batch(llm, tokens, budgets), options, burst)


def _budgets(context: int, tokens: list[list[int]], options: list[Options]) -> list[int]:
    """How many tokens each prompt may get; says where that is fewer than asked for."""
    asked = [each.max_new_tokens for each in options]
    budgets = [min(most, context - len(row)) for row, most in zip(tokens, asked, strict=True)]
    cut = [index for index, budget in enumerate(budgets) if budget < asked[index]]
    if cut:
        first = min(cut, key=budgets.__getitem__)
        which = "the text" if len(tokens) == 1 else f"{len(cut)} of {len(tokens)} texts, the first"
        note(
            f"max_new_tokens={asked[first]:,}: the model's context of {context:,} tokens ends "
            f"{which} after {budgets[first]:,}"
        )
    return budgets


def _stop_tokens(llm: LLM, options: Options) -> set[int]:
    """The tokens that end a text, the model's own among them."""
    for token in options.stop_tokens:
        if token >= llm.config.vocab:
            raise UserError(
                f"stop_tokens: token {token} is outside the vocabulary of {llm.config.vocab} tokens"
            )
    own = frozenset() if options.ignore_eos else llm.tokenizer.stop_tokens
    return {*options.stop_tokens, *own}


def _pieces(llm, tokens, budgets, stops, batch: "Batch", options: list[Options], burst: int):
    clock = _Clock()
    hidden = batch.prefill(llm, tokens)
    state = _initial_state(llm, tokens, budgets, stops, options, batch.rows)
    state, drawn = draw_token(llm.config, llm.params, hidden, state)
    cache = batch.cache
    if max(budgets) > 1:
        run = llm.config, llm.params, llm.basis
        cache, state = prepare_burst(*run, cache, state, llm.implementation)
    writers = [
        _Writer(TextStream(llm.tokenizer, each.stop_strings), len(row), each.sampling.seed)
        for row, each in zip(tokens, options, strict=True)
    ]
    while True:
        host: tuple[Decoding, Drawn] = jax.device_get((_light(state), drawn))
        clock.mark_prefill()
        for index, writer in enumerate(writers):
            if writer.done:
                continue
            text = writer.take(host[0], host[1], index)
            generation = writer.result(clock) if writer.done else None
            if text or generation:
                yield Piece(index, text, generation)
        if all(writer.done for writer in writers):
            return
        # A stop string is only seen here: tell the device.
        going = np.zeros(batch.rows, bool)
        going[: len(writers)] = [not writer.done for writer in writers]
        state = dataclasses.replace(state, active=jax.device_put(going))
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

    def __init__(self, text: TextStream, prompt_tokens: int, seed: int):
        self._stream, self._prompt_tokens, self._seed = text, prompt_tokens, seed
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
        stops = set(state.stop_tokens[row].tolist())
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

    def result(self, clock: _Clock) -> Generation:
        return Generation(
            "".join(self._text),
            self._tokens,
            self._logprobs,
            self._reason,
            self._prompt_tokens,
            self._seed,
            clock.timings(),
            self._error,
        )


def _initial_state(llm, tokens, budgets, stops, options: list[Options], rows: int) -> Decoding:
    padded_stops = np.full((rows, power_of_two(max(map(len, stops)), 8)), -1, np.int32)
    seen = np.zeros((rows, llm.config.vocab), bool)
    for row, (prompt, ends) in enumerate(zip(tokens, stops, strict=True)):
        seen[row, prompt] = True
        padded_stops[row, : len(ends)] = sorted(ends)
    padding = rows - len(tokens)
    # Made by numpy: every small array that jax.numpy makes is a program to compile.
    return Decoding(
        token=jax.device_put(np.zeros(rows, np.int32)),
        made=jax.device_put(np.zeros(rows, np.int32)),
        budget=jax.device_put(np.asarray([*budgets, *[0] * padding], np.int32)),
        active=jax.device_put(np.arange(rows) < len(tokens)),
        failed=jax.device_put(np.zeros(rows, bool)),
        seen=jax.device_put(seen),
        stop_tokens=jax.device_put(padded_stops),
        sampler=SamplerArrays.stack(
            [*(each.sampling for each in options), *[Sampling()] * padding]
        ),
    )


def _light(state: Decoding) -> Decoding:
    """The state without the large array that the host has no use for."""
    return dataclasses.replace(state, seen=None)  # pyright: ignore[reportArgumentType]
