"""The engine: requests come at any time, run together, and end on their own.

A tick (`Engine.step`) asks the scheduler what is next, launches it, and reads what the launch
before it has drawn. On a GPU a burst of tokens is launched before those of the burst before it are
known, so that the device has work while the host reads.
"""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jkvq.cache.layout import table_columns
from jkvq.cache.shape import CacheShape
from jkvq.engine.capacity import engine_limits, page_bytes, pools_bytes
from jkvq.engine.detokenize import TextStream
from jkvq.engine.drawing.adjust import all_allowed
from jkvq.engine.drawing.fit import require_fit, stop_tokens
from jkvq.engine.drawing.grammar import Matcher
from jkvq.engine.drawing.scores import Scored
from jkvq.engine.options import Options, options_by_prompt
from jkvq.engine.prompt import Prompt, as_batch, encode_prompt
from jkvq.engine.runner import Runner, Start, nothing_known
from jkvq.engine.steps import Drawn, most_steps
from jkvq.engine.writer import Handle, Scores, Tops, Writer
from jkvq.llm import LLM
from jkvq.scheduling.scheduler import Chunk, Limits, Scheduler
from jkvq.scheduling.sequence import Sequence
from jkvq.support.arguments import flag, shown
from jkvq.support.errors import UserError

# Tokens per burst, unless a window allows fewer: while somebody watches or a prompt is not stored
# yet, and else. Shorter ones leave an ended sequence's slot empty for less time. A CPU launches
# each token anyway; a GPU compiles a program for each number.
_SHORT = {"cpu": 1, "gpu": 8}
_LONG = {"cpu": 4, "gpu": 8}


@dataclass(frozen=True)
class Stats:
    """What an engine holds now, and what it has done since it was made.

    pages, exact_pages, local_pages: in use and in all, of the packed pool, of that of windows and
        of that of layers with a window; stored prompts that nobody reads count as used.
    used_bytes: of the pages in use.
    bf16_bytes: what a cache of 16 bits would take for the tokens of these pages, at least.
    """

    running: int
    waiting: int
    slots: int
    pages: tuple[int, int]
    exact_pages: tuple[int, int]
    local_pages: tuple[int, int]
    pool_bytes: int
    used_bytes: int
    bf16_bytes: int
    prefilled_tokens: int
    cached_tokens: int
    drawn_tokens: int
    preemptions: int
    evictions: int


class _Launched(NamedTuple):
    """Tokens that a launch draws: of whom in which row, in which of their runs."""

    drawn: Drawn
    rows: list[tuple[int, Handle, int]]


class _Scored(NamedTuple):
    """Log probabilities of prompts that a launch reckons: of which chunk of whom in which row."""

    scored: Scored
    rows: list[tuple[int, Handle, Chunk]]


class Engine:
    """Runs requests together over one pool of pages.

    Args:
        llm: from `jkvq.load`.
        memory: the part of the free memory that the pools may take; no more than all slots need.
        pages: of the pool of packed pages, instead.
        slots: sequences that run at once; by default 8 on a CPU and 64 on a GPU.
        prefix_cache: keep stored prompts for others that begin alike.
        prefill_rows: prompts that one program takes a chunk of. More are faster where prompts are
            short. With 1 a text does not depend on its company to the last bit; else it does so by
            the rounding of sums.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        memory: float = 0.9,
        pages: int | None = None,
        slots: int | None = None,
        prefix_cache: bool = True,
        prefill_rows: int = 8,
    ):
        require_llm(llm)
        sizes = {"memory": memory, "pages": pages, "slots": slots, "prefill_rows": prefill_rows}
        self._set_up(llm, engine_limits(llm, **sizes), flag("prefix_cache", prefix_cache))

    @classmethod
    def of(cls, llm: LLM, limits: Limits) -> "Engine":
        """An engine of these sizes."""
        require_llm(llm)
        engine = cls.__new__(cls)
        engine._set_up(llm, limits, prefix_cache=True)
        return engine

    def _set_up(self, llm: LLM, limits: Limits, prefix_cache: bool) -> None:
        self.llm = llm
        window = CacheShape.of(llm.config).window
        self._scheduler = Scheduler(llm.spec, limits, window=window, prefix_cache=prefix_cache)
        self._runner = Runner(llm, limits)
        self._pool_bytes, self._page_bytes = pools_bytes(llm, limits), page_bytes(llm)
        self._handles: dict[int, Handle] = {}  # of requests that have not ended, by their number
        self._unread: deque[_Launched | _Scored] = deque()
        self._lock = threading.RLock()
        self._torn = False  # a tick was planned, and not all of it launched
        self._arrived = self._prefilled = self._cached = self._drawn = 0
        on_cpu = jax.default_backend() == "cpu"
        self._ahead = 0 if on_cpu else 1  # bursts that run while the host reads
        device, most = "cpu" if on_cpu else "gpu", most_steps(llm.spec)
        self._short, self._long = (min(most, steps[device]) for steps in (_SHORT, _LONG))

    @property
    def slots(self) -> int:
        """Sequences that run at once."""
        return self._scheduler.limits.slots

    def budget(self, tokens: int, asked: int | None = None) -> int:
        """Tokens that an answer to a prompt of so many may have.

        Args:
            tokens: of the prompt, fewer than the model's context.
            asked: for the answer, which the context may cut; None is as many as there is room for.
        """
        most, context = self._scheduler.most_tokens, self.llm.config.context - tokens
        room = most + 1 - tokens  # the last token is never stored
        budget = min(context, max(room, 1) if asked is None else asked)
        if budget > room:
            raise UserError(
                f"{tokens} tokens of prompt and {budget} of answer never fit the engine's pool, "
                f"which holds {most}: shorten the prompt, ask for fewer tokens, or give the "
                "engine more memory"
            )
        return budget

    @property
    def stats(self) -> Stats:
        with self._lock:
            scheduler, limits = self._scheduler, self._scheduler.limits
            *each, plain = self._page_bytes
            pools = scheduler.packed, scheduler.exact, scheduler.local
            return Stats(
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                slots=limits.slots,
                pages=(scheduler.packed.used, limits.pages - 1),
                exact_pages=(scheduler.exact.used, limits.exact_pages - 1),
                local_pages=(scheduler.local.used, limits.local_pages - 1),
                pool_bytes=self._pool_bytes,
                used_bytes=sum(pool.used * x for pool, x in zip(pools, each, strict=True)),
                bf16_bytes=scheduler.held_pages * plain,
                prefilled_tokens=self._prefilled,
                cached_tokens=self._cached,
                drawn_tokens=self._drawn,
                preemptions=scheduler.preempted,
                evictions=scheduler.prefix.evicted,
            )

    def submit(self, prompt: Prompt, options: Options | None = None, **changes: Any) -> Handle:
        """Takes a request; it runs while somebody waits for a handle or calls `step`.

        Args:
            prompt: text, a conversation (messages with role and content) or tokens.
            options: None is `jkvq.Options()`.
            **changes: fields of `jkvq.Options` that take the place of theirs.
        """
        batch, single = as_batch(prompt)
        if not single:
            raise UserError(f"submit takes one prompt, not {len(batch)}: call it for each")
        asked = options_by_prompt(options, changes, 1)[0]
        return self.submit_tokens(
            encode_prompt(self.llm, batch[0], asked.chat, asked.answer_start), asked
        )

    def submit_tokens(
        self, tokens: list[int], options: Options, label: str | None = None
    ) -> Handle:
        """Takes a prompt of checked tokens, with a seed; an error calls it by ``label``."""
        require_fit(self.llm, options)
        llm, stops = self.llm, stop_tokens(self.llm, options)
        with self._lock:
            self._require_whole()
            budget = self.budget(len(tokens), max(options.max_new_tokens, 1))
            scored, silent = options.prompt_logprobs, options.max_new_tokens == 0
            sequence = Sequence(self._arrived, tokens, budget, scored=scored)
            stream = TextStream(llm.tokenizer, options.stop_strings)
            label, seed = label or f"request {self._arrived}", options.sampling.seed
            matcher = None
            if options.grammar is not None:
                matcher = Matcher(llm.tokenizer, llm.config.vocab, options.grammar)
            writer = Writer(stream, label, stops, seed, silent=silent, matcher=matcher)
            tops = options.top_logprobs
            start = Start(
                *(-1, tokens, budget, sorted(stops), options.sampling, -1, bool(tops), None)
            )
            handle = Handle(self, sequence, writer, start, tops)
            self._scheduler.submit(sequence)
            self._handles[self._arrived] = handle
            self._arrived += 1
            return handle

    def cancel(self, handle: Handle) -> None:
        """Ends a request with what there is."""
        with self._lock:
            if not handle.done:
                handle.writer.cancel()
                self._end(handle)

    def step(self) -> list[Handle]:
        """A tick; returns the requests that have something new.

        Whatever interrupts it, such as Ctrl-C, ends the engine: pages that were granted may hold
        nothing.
        """
        with self._lock:
            self._require_whole()
            self._torn = True
            changed = self._tick()
            self._torn = False
            return changed

    def _require_whole(self) -> None:
        if self._torn:
            raise UserError("this engine was interrupted in the middle of a tick: make a new one")

    def _tick(self) -> list[Handle]:
        watched = any(handle.watched for handle in self._handles.values())
        # A grammar must have seen all tokens before it says which may come next.
        waits = any(handle.writer.matcher for handle in self._handles.values())
        steps = self._short if watched or self._scheduler.reads else self._long
        steps, ahead = (1, 0) if waits else (steps, self._ahead)
        plan, changed = self._scheduler.plan(steps), []
        for group in plan.groups:
            self._prefill(group)
        if waits:
            changed += self._read_until(0)
        going = [(each.number, at) for each, at in plan.decoding if each.number in self._handles]
        if going:
            self._burst([(self._handles[number], at) for number, at in going], steps)
        return [*changed, *self._read_until(ahead if going else 0)]

    def _read_until(self, ahead: int) -> Iterator[Handle]:
        """Reads what was launched, but for the latest."""
        while len(self._unread) > ahead:
            yield from self._read(self._unread.popleft())

    def _prefill(self, group: list[Chunk]) -> None:
        width = self._scheduler.width(max(chunk.end - chunk.start for chunk in group))
        handles = [self._handles[chunk.sequence.number] for chunk in group]
        for chunk in group:
            self._prefilled += chunk.end - chunk.start
            if chunk.start == chunk.sequence.cached:
                self._cached += chunk.start
        ends = [(row, handles[row]) for row, chunk in enumerate(group) if chunk.last]
        starts: list[Start | None] = [None] * len(group)
        for row, handle in ends:
            starts[row] = handle.starts()

        hidden, scored = self._runner.prefill(group, width)
        if scored is not None:
            rows = [(row, handles[row], chunk) for row, chunk in enumerate(group)]
            self._unread.append(_Scored(scored, [each for each in rows if each[2].sequence.scored]))
        if ends:
            self._launched(self._runner.join(hidden, starts), ends)

    def _burst(self, handles: list[tuple[Handle, int]], steps: int) -> None:
        limits, tables = self._scheduler.limits, self._scheduler.tables
        steps = min(steps, max(handle.sequence.budget - first for handle, first in handles))
        keep, known = np.zeros(limits.slots, bool), nothing_known(limits.slots)
        longest = 0
        for handle, first in handles:
            sequence = handle.sequence
            keep[sequence.slot] = True
            longest = max(longest, sequence.granted)
            # What was drawn in an earlier run is drawn again: no row of it ends before.
            again = handle.writer.tokens[first : first + steps]
            known[sequence.slot, : len(again)] = again
        columns = min(limits.columns, table_columns(longest, self.llm.spec))
        now = tables[:, :, :columns].copy()
        allowed = self._allowed([handle for handle, _ in handles])
        drawn = self._runner.burst(now, keep, known, steps, allowed)
        self._launched(drawn, [(handle.sequence.slot, handle) for handle, _ in handles])

    def _allowed(self, handles: list[Handle]) -> Int[np.ndarray, "B W"] | None:
        """A bit for each token that each slot may draw; None if nobody has a grammar."""
        matchers = [(each.sequence.slot, each.writer.matcher) for each in handles]
        if not any(matcher for _, matcher in matchers):
            return None
        allowed = all_allowed(self.slots, self.llm.config.vocab)
        for slot, matcher in matchers:
            if matcher is not None:
                allowed[slot] = matcher.allowed()
        return allowed

    def _launched(self, drawn: Drawn, rows: list[tuple[int, Handle]]) -> None:
        """Notes what is to be read later."""
        rows_of_runs = [(row, handle, handle.sequence.run) for row, handle in rows]
        self._unread.append(_Launched(drawn, rows_of_runs))

    def _read(self, launched: _Launched | _Scored) -> Iterator[Handle]:
        """Takes what a launch has drawn, and ends the requests that have ended by it."""
        if isinstance(launched, _Scored):
            _read_prompts(launched)
            return
        host: Any = jax.device_get(launched.drawn)
        for row, handle, run in launched.rows:
            sequence, writer = handle.sequence, handle.writer
            if handle.done or sequence.run != run:  # ended or preempted since
                continue
            count, again = int(host.count[row]), len(writer.tokens) - sequence.read
            self._scheduler.advance(sequence, count)
            ended, failed = not host.active[row], bool(host.failed[row])
            if again >= count and not ended:
                continue  # all of these were read in an earlier run
            self._drawn += count - again
            new = slice(max(again, 0), count)
            try:
                writer.take(
                    *(host.tokens[row, new].tolist(), host.logprobs[row, new].tolist()),
                    _tops_at(host.tops, (row, new), handle.tops),
                    ended=ended,
                    failed=failed,
                    watched=handle.watched,
                )
            except Exception as error:  # of the tokenizer: nobody else's affair
                writer.fail(f"the text of request {handle.number} cannot be written: {error}")
            if handle.done:
                self._end(handle)
            yield handle

    def _end(self, handle: Handle) -> None:
        self._scheduler.end(handle.sequence)
        del self._handles[handle.number]
        if not self._handles:  # what was launched ahead is nobody's, and would keep the engine
            self._unread.clear()


def _read_prompts(launched: _Scored) -> None:
    host: Any = jax.device_get(launched.scored)
    for row, handle, (sequence, start, end, _) in launched.rows:
        behind = slice(0, min(end, len(sequence.prompt) - 1) - start)
        tokens = sequence.prompt[start + 1 : end + 1]
        tops: list[Tops | None] = [*_tops_at(host.tops, (row, behind), handle.tops)]
        if start == 0:  # nothing stands before the first token
            first = Scores([sequence.prompt[0]], [None], [None] if handle.tops else [])
            handle.writer.take_prompt(0, first)
        logprobs = host.logprobs[row, behind].tolist()
        handle.writer.take_prompt(start + 1, Scores([*tokens], logprobs, tops))


def _tops_at(host: Any, places: tuple[int, slice], count: int) -> list[Tops]:
    """The likeliest ``count`` tokens at some places."""
    if not count:
        return []
    pairs = zip(host.tokens[places].tolist(), host.logprobs[places].tolist(), strict=True)
    return [dict(zip(tokens[:count], logprobs, strict=False)) for tokens, logprobs in pairs]


def require_llm(llm: Any) -> None:
    """Refuses what has no cache to run with."""
    if not isinstance(llm, LLM):
        raise UserError(f"{shown(llm)} cannot generate: give what jkvq.load returns")
