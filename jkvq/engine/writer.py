"""What comes of a request: its tokens as they are read from the device, its text, its end."""

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from jkvq.engine.detokenize import TextStream
from jkvq.support.compile_clock import Compiling, compiling

FinishReason = Literal["stop", "length", "error", "cancelled"]


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
    """

    def __init__(self, text: TextStream, label: str, stops: Collection[int], seed: int):
        self._stream, self._label, self._stops, self._seed = text, label, stops, seed
        self._clock = _Clock()
        self._timings = Timings(0.0, 0.0, 0.0, 0.0)  # until it has ended
        self._given: list[str] = []
        self._new = ""
        self._reason: FinishReason = "length"
        self._error: str | None = None
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.done = False

    def take(self, tokens: list[int], logprobs: list[float], *, ended: bool, failed: bool) -> None:
        """Takes new tokens; ``ended``: no more come, ``failed``: as the last is no number."""
        self._clock.mark_first_token()
        if failed:  # what was drawn from scores that are not numbers is no token
            tokens, logprobs = tokens[:-1], logprobs[:-1]
        for token, logprob in zip(tokens, logprobs, strict=True):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            if token not in self._stops:
                self._stream.add(token)
            if token in self._stops or self._stream.stopped:
                self._reason = "stop"
                break
        if failed and self._reason == "length":
            self.fail(
                f"the model's scores for token {len(self.tokens) + 1} of {self._label} are not "
                "numbers (NaN): its weights are damaged, or the dtype is too narrow for them"
            )
        elif ended or self._reason == "stop":
            self._end()
        else:
            self._new += self._stream.take()

    def fail(self, error: str) -> None:
        """Ends it with an error, and the text that was certain before."""
        self._reason, self._error = "error", error
        self._stop()

    def cancel(self) -> None:
        """Ends it with what there is."""
        self._reason = "cancelled"
        self._end()

    def _end(self) -> None:
        self._new += self._stream.finish()
        self._stop()

    def _stop(self) -> None:
        self._timings, self.done = self._clock.timings(), True

    def new_text(self) -> str:
        """What is certain of the text and was not given yet."""
        text, self._new = self._new, ""
        self._given.append(text)
        return text

    def result(self, prompt_tokens: int, cached_tokens: int) -> Generation:
        return Generation(
            "".join(self._given) + self._new,
            self.tokens,
            self.logprobs,
            self._reason,
            prompt_tokens,
            self._seed,
            self._timings,
            self._error,
            cached_tokens,
        )
