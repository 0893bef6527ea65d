"""The thread that runs the engine, and the calls whose texts it hands to the event loop.

All that touches the engine happens in its thread, between two ticks: the event loop asks for it
through a queue and never waits. What a tick has written comes back in one go.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

from jkvq.engine.engine import Engine
from jkvq.engine.options import Options
from jkvq.engine.writer import Generation, Handle, Scores
from jkvq.server.errors import ApiError
from jkvq.server.guard import Guard
from jkvq.server.metrics import Metrics

LOG = logging.getLogger("jkvq.server")
_RETRY = "1"  # seconds: some text ends soon, and its slot is free
_LAST_TICK = 5.0  # seconds
_QUIET = 1.0  # seconds without a text, before the guard looks at others again


@dataclass(frozen=True)
class Piece:
    """What is new of one text of a call; the last one brings the whole `Generation`."""

    index: int
    text: str
    scores: Scores  # of the prompt too, first of all, if they were asked for
    generation: Generation | None


class Call:
    """The texts that one request asks for."""

    def __init__(self, texts: int):
        self.began, self.texts = time.perf_counter(), texts
        self.left = texts  # that have not ended, as far as the loop knows
        self.first_tokens: dict[int, float] = {}  # when they came, by text
        self.came: asyncio.Queue[Piece | ApiError] = asyncio.Queue()

    async def pieces(self) -> AsyncIterator[Piece]:
        """What is new of any of its texts, until all have ended; a failure of one is raised."""
        ended = 0
        while ended < self.texts:
            piece = await self.came.get()
            if isinstance(piece, ApiError):
                raise piece
            if piece.generation is not None and piece.generation.error is not None:
                raise ApiError(500, piece.generation.error)
            yield piece
            ended += piece.generation is not None


@dataclass
class _Going:
    """A text in the engine, and how many of its tokens the loop has."""

    call: Call
    index: int
    handle: Handle
    given: int = 0


class Driver:
    """Runs an engine in a thread of its own.

    Args:
        engine: nobody else may touch it.
        most: texts that may be running or waiting.
        metrics: what is noted of every text.
        guard: looks at texts again when nobody waits, if there is one.
        on_failure: called in the event loop if the engine itself fails, which nothing mends.
    """

    def __init__(
        self,
        engine: Engine,
        most: int,
        metrics: Metrics,
        on_failure: Callable[[], None],
        guard: Guard | None = None,
    ):
        self.engine, self.most, self._metrics, self._guard = engine, most, metrics, guard
        self._on_failure = on_failure
        self.stats = engine.stats  # as of the latest tick
        self.draining = False
        self.failure: Exception | None = None  # of the engine itself
        self._calls: set[Call] = set()
        self._asked: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._going: dict[int, _Going] = {}  # the thread's own
        self._thread = threading.Thread(target=self._run, daemon=True, name="jkvq-engine")

    # In the event loop

    def start(self) -> None:
        """Lets the engine run; what it writes goes to the loop that runs now."""
        self.loop, self._emptied = asyncio.get_running_loop(), asyncio.Event()
        self._emptied.set()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread, after the tick that it is in, if that does not compile for long."""
        self._asked.put(lambda: False)
        await asyncio.to_thread(self._thread.join, _LAST_TICK)

    def open(self, texts: int) -> Call:
        """Takes a place for the texts of a request; `close` gives it back."""
        if self.draining or self.failure is not None:
            raise ApiError(503, "the server is ending: ask another one", code="unavailable")
        if texts > self.most:
            raise ApiError(
                400, f"the request asks for {texts} texts, and the server takes {self.most} at once"
            )
        open_texts = sum(call.left for call in self._calls)
        if open_texts + texts > self.most:
            raise ApiError(
                429,
                f"{open_texts} texts are running or waiting, and the server takes {self.most}: "
                "try again soon",
                code="rate_limit_exceeded",
                headers={"Retry-After": _RETRY},
            )
        call = Call(texts)
        self._calls.add(call)
        self._emptied.clear()
        return call

    def submit(
        self, call: Call, prompts: Sequence[tuple[list[int], Options]], *, watched: bool
    ) -> None:
        """Lets the texts of a call run: prompts as tokens, and options with a seed."""
        self._asked.put(lambda: self._submit(call, prompts, watched))

    def close(self, call: Call) -> None:
        """Ends what has not ended of a call; its pages are free after the tick that runs now."""
        if call in self._calls:
            self._calls.remove(call)
            if call.left:
                self._asked.put(lambda: self._cancel(call))
            if not self._calls:
                self._emptied.set()

    async def drain(self, seconds: float) -> None:
        """Takes no more calls; waits for those that there are, and ends them when time is up."""
        self.draining = True
        try:
            await asyncio.wait_for(self._emptied.wait(), seconds)
        except TimeoutError:
            self._fail(self._calls, ApiError(503, "the server is ending", code="unavailable"))

    def _take(self, pieces: Iterable[tuple[Call, Piece]]) -> None:
        """Hands on what a tick has written."""
        now = time.perf_counter()
        for call, piece in pieces:
            if piece.index not in call.first_tokens:
                call.first_tokens[piece.index] = now
                self._metrics.first_token(now - call.began)
            if piece.generation is not None:
                call.left -= 1
                self._metrics.ended(piece.generation, now - call.first_tokens[piece.index])
            call.came.put_nowait(piece)

    def _fail(self, calls: Iterable[Call], error: ApiError) -> None:
        for call in calls:
            call.came.put_nowait(error)

    def _break(self, error: Exception) -> None:
        """Without an engine nobody gets an answer."""
        self.failure = error
        self._fail(self._calls, ApiError(500, "the engine has failed; the server's log says why"))
        self._on_failure()

    # In the thread

    def _run(self) -> None:
        try:
            while self._obey():
                self._hand_over(self.engine.step())
                self.stats = self.engine.stats
        except Exception as error:
            LOG.exception("the engine has failed")
            self.loop.call_soon_threadsafe(self._break, error)

    def _obey(self) -> bool:
        """Does what was asked for, until there is something to run; returns whether to go on."""
        goes_on = True
        while goes_on and not (self._going and self._asked.empty()):
            if not self._going:
                self.stats = self.engine.stats
            goes_on = self._next_wish()()
        return goes_on

    def _next_wish(self) -> Callable[[], bool]:
        """Waits for what is asked for next; when nobody has for a while the guard has the time."""
        pause = _QUIET
        while not self._going and self._guard is not None and self._guard.waits:
            try:
                return self._asked.get(timeout=pause)
            except queue.Empty:
                pause = 0.0
                self._look_again(self._guard)
        return self._asked.get()

    def _look_again(self, guard: Guard) -> None:
        try:
            guard.work()
        except Exception:  # no text is worse for it
            LOG.exception("the guard has failed, and does no more")
            self._guard = None

    def _submit(
        self, call: Call, prompts: Sequence[tuple[list[int], Options]], watched: bool
    ) -> bool:
        try:
            for index, (tokens, options) in enumerate(prompts):
                handle = self.engine.submit_tokens(tokens, options)
                handle.watched = watched
                self._going[handle.number] = _Going(call, index, handle)
        except Exception:  # a bug of ours, and one request's: it will be closed, others go on
            LOG.exception("a request could not be submitted")
            failed = ApiError(500, "the request could not be run; the server's log says why")
            self.loop.call_soon_threadsafe(self._fail, [call], failed)
        return True

    def _cancel(self, call: Call) -> bool:
        for number in [number for number, going in self._going.items() if going.call is call]:
            self._going.pop(number).handle.cancel()
            self._metrics.cancelled()
        return True

    def _hand_over(self, changed: Iterable[Handle]) -> None:
        new = [
            (going.call, self._piece(going))
            for number in dict.fromkeys(handle.number for handle in changed)
            if (going := self._going.get(number)) is not None
        ]
        if new:
            self.loop.call_soon_threadsafe(self._take, new)

    def _piece(self, going: _Going) -> Piece:
        handle, writer = going.handle, going.handle.writer
        scores = writer.scores(going.given)
        going.given = len(writer.tokens)
        ended = handle.result() if handle.done else None
        if ended is not None:
            del self._going[handle.number]
            if self._guard is not None and ended.error is None:
                self._guard.take(handle.sequence.prompt, ended.tokens)
        return Piece(
            going.index,
            writer.new_text(),
            scores,
            ended,
        )
