"""What comes of a request: its tokens as they are read from the device, its text, its end."""

import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from jkvq.engine.detokenize import TextStream
from jkvq.engine.drawing.grammar import Matcher
from jkvq.engine.runner import Start
from jkvq.scheduling.sequence import Sequence
from jkvq.support.compile_clock import Compiling, compiling

FinishReason = Literal["stop", "length", "error", "cancelled"]


Tops = dict[int, float]  # the likeliest tokens and their log probabilities, the likeliest first


@dataclass(frozen=True)
class Scores:
    """Tokens with their log probabilities, and those of the likeliest.

    logprobs: of the first token of a prompt there is none.
    tops: empty unless they were asked for.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[Tops | None] = field(default_factory=list)

    def extend(self, other: "Scores") -> None:
        """Takes what follows."""
        self.tokens.extend(other.tokens)
        self.logprobs.extend(other.logprobs)
        self.tops.extend(other.tops)

    def from_on(self, start: int) -> "Scores":
        return Scores(self.tokens[start:], self.logprobs[start:], self.tops[start:])


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of one request.

    prefill: from its submission to its first token, waiting for others included.
    decode: from there to its end.
    compile, fetch: of programs that were compiled meanwhile, and of those that an earlier process
        had kept; neither is part of the other figures.
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
    cached_tokens: of the prompt, those that another had stored before.
    top_logprobs: the likeliest tokens where each was drawn, as many as were asked for.
    prompt: the tokens of the prompt as the model scores them, if `Options.prompt_logprobs` is set.
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    prompt_tokens: int
    seed: int
    timings: Timings
    error: str | None = None
    cached_tokens: int = 0
    top_logprobs: list[Tops] = field(default_factory=list)
    prompt: Scores = field(default_factory=Scores)


class _Clock:
    """Seconds since its making, split into prefill, decode and what programs took."""

    def __init__(self):
        self._start, self._first = self._now(), None

    @staticmethod
    def _now() -> tuple[float, Compiling]:
        return time.perf_counter(), compiling()

    def mark_first_token(self) -> None:
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


class Writer:
    """Collects what is drawn for one request.

    label: what an error calls it, such as "prompt 0".
    stops: the tokens that end it.
    silent: what is drawn is not wanted, the prompt alone is.
    matcher: of the grammar that it follows.
    """

    def __init__(
        self,
        text: TextStream,
        label: str,
        stops: Collection[int],
        seed: int,
        *,
        silent: bool = False,
        matcher: Matcher | None = None,
    ):
        self._stream, self._label, self._stops, self._seed = text, label, stops, seed
        self._silent, self.matcher = silent, matcher
        self._clock = _Clock()
        self._timings = Timings(0.0, 0.0, 0.0, 0.0)  # until it has ended
        self._given: list[str] = []
        self._new: deque[str] = deque()  # others take from it while a tick adds to it
        self._reason: FinishReason = "length"
        self._error: str | None = None
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[Tops] = []
        self.prompt = Scores()
        self.done = False

    def take_prompt(self, start: int, scores: Scores) -> None:
        """Takes the tokens from ``start`` on of the prompt, unless an earlier run brought them."""
        if start == len(self.prompt.tokens):
            self.prompt.extend(scores)

    def take(
        self,
        tokens: list[int],
        logprobs: list[float],
        tops: list[Tops],
        *,
        ended: bool,
        failed: bool,
        watched: bool,
    ) -> None:
        """Takes new tokens.

        ended: no more come.
        failed: the last of them is none, as the scores were no numbers.
        watched: somebody reads along; else the text is made at the end, which is less work.
        """
        self._clock.mark_first_token()
        taken = 0 if self._silent else len(tokens)
        if failed:
            taken = len(tokens) - 1
        taken = self._until_end(tokens[:taken])
        self.tokens += tokens[:taken]
        self.logprobs += logprobs[:taken]
        self.tops += tops[:taken]
        if failed and self._reason == "length":
            self._new.append(self._stream.take())
            self.fail(
                f"the model's scores for token {len(self.tokens) + 1} of {self._label} are not "
                "numbers (NaN): its weights are damaged, or the dtype is too narrow for them"
            )
        elif ended or self._reason == "stop":
            self._end()
        elif watched:
            self._new.append(self._stream.take())

    def _until_end(self, tokens: list[int]) -> int:
        """Writes new tokens, and says how many: fewer than all if the text has ended by one."""
        written = tokens
        for place, token in enumerate(tokens):
            complete = self.matcher is not None and self.matcher.take(token)
            if complete or token in self._stops:
                self._reason, tokens = "stop", tokens[: place + 1]
                written = tokens[:place] if token in self._stops else tokens
                break
        count = self._stream.add(written)
        if not self._stream.stopped:
            return len(tokens)
        self._reason = "stop"
        return count

    def fail(self, error: str) -> None:
        """Ends it with an error, and the text that was certain before."""
        self._reason, self._error = "error", error
        self._stop()

    def cancel(self) -> None:
        """Ends it with what there is."""
        self._reason = "cancelled"
        self._end()

    def _end(self) -> None:
        self._new.append(self._stream.finish())
        # A stop string may stand in what looked like half a character until now.
        if self._stream.stopped and self._reason == "length":
            self._reason = "stop"
        self._stop()

    def _stop(self) -> None:
        self._timings, self.done = self._clock.timings(), True

    def new_text(self) -> str:
        """What is certain of the text and was not given yet."""
        pieces = [self._new.popleft() for _ in range(len(self._new))]
        self._given += pieces
        return "".join(pieces)

    def scores(self, start: int) -> Scores:
        """What was drawn from ``start`` on; all of it has that of the prompt before it."""
        logprobs: list[float | None] = [*self.logprobs[start:]]
        drawn = Scores(self.tokens[start:], logprobs, [*self.tops[start:]])
        if start or not self.prompt.tokens:
            return drawn
        scores = self.prompt.from_on(0)
        scores.extend(drawn)
        return scores

    def result(self, prompt_tokens: int, cached_tokens: int) -> Generation:
        return Generation(
            "".join([*self._given, *self._new]),
            self.tokens,
            self.logprobs,
            self._reason,
            prompt_tokens,
            self._seed,
            self._timings,
            self._error,
            cached_tokens,
            self.tops,
            self.prompt,
        )


class Ticking(Protocol):
    """An engine, as a request sees it."""

    def step(self) -> "list[Handle]":
        """A tick, for all requests."""
        ...

    def cancel(self, handle: "Handle") -> None:
        """Ends a request."""
        ...


class Handle:
    """A request: its text as it comes, its result, and a way to end it.

    Whoever waits for a handle runs the engine meanwhile, for all requests.
    """

    def __init__(
        self, engine: Ticking, sequence: Sequence, writer: Writer, start: Start, tops: int
    ):
        self.engine, self.sequence, self.writer, self._start = engine, sequence, writer, start
        self.tops = tops  # likeliest tokens to tell, at each place
        self.watched = False

    @property
    def number(self) -> int:
        """Of its arrival."""
        return self.sequence.number

    @property
    def done(self) -> bool:
        return self.writer.done

    def __iter__(self) -> Iterator[str]:
        """Pieces of the text, as it is written; they add up to it."""
        self.watched = True
        try:
            while True:
                ended = self.done  # before the text is taken: it may end while a piece is read
                if text := self.writer.new_text():
                    yield text
                if ended:
                    return
                if not self.done:
                    self.engine.step()
        finally:
            self.watched = False

    def result(self) -> Generation:
        """What came of it, when it has ended; an ``error`` is in it, not raised."""
        while not self.done:
            self.engine.step()
        return self.writer.result(len(self.sequence.prompt), self.sequence.cached)

    def cancel(self) -> None:
        """Ends it with what there is; its pages are free at once."""
        self.engine.cancel(self)

    def starts(self) -> Start:
        """How its slot begins: with what it has drawn before, if it was preempted."""
        known = self.writer.tokens[0] if self.writer.tokens else -1
        matcher = self.writer.matcher
        allowed = None if matcher is None else matcher.allowed()
        return self._start._replace(slot=self.sequence.slot, known=known, allowed=allowed)
