"""Which sequences run, what each of them does next, and in which pages: the ticks of an engine.

A tick is some chunks of prompts, within a budget of tokens, and a burst of decode steps. Pages are
granted before a burst is launched, for all that it may draw; a burst never asks for one. Where the
pool is short, stored prompts that nobody reads go first, then the youngest sequence, which begins
again later. Sequences come in the order of their arrival: the oldest always goes on, so all end.
"""

import bisect
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jkvq.cache.layout import first_page
from jkvq.cache.sizes import PADDING_PAGE
from jkvq.cache.specs.spec import CacheSpec
from jkvq.scheduling.page_pool import PagePool
from jkvq.scheduling.prefix_cache import PrefixCache
from jkvq.scheduling.sequence import Sequence, chunk_names
from jkvq.scheduling.window import Held, Window

_SPARE = 16  # one of so many slots may be empty until several prompts can begin together


@dataclass(frozen=True)
class Limits:
    """The sizes of an engine.

    slots: sequences that run at once.
    pages, exact_pages, local_pages: of the pools, the page that takes padding among them: packed
        pages, pages of windows, and packed pages of layers that see the latest tokens only.
    columns: of a block table: pages of the longest sequence.
    chunks: tokens of a prompt that are stored at once, the widths that there are programs for;
        prompts are cut at multiples of the largest.
    rows: prompts that one program takes a chunk of.
    row_step: numbers of rows that there are programs for are the powers of this.
    tick_tokens: prompt tokens between two bursts, at most, unless a single chunk is longer.
    """

    slots: int
    pages: int
    exact_pages: int
    columns: int
    chunks: tuple[int, ...]
    rows: int
    tick_tokens: int
    row_step: int = 2
    local_pages: int = 1

    def rows_of(self, width: int) -> int:
        """Prompts at most that one program takes a chunk of this width of."""
        return min(self.rows, max(1, self.tick_tokens // width))

    def padded_rows(self, prompts: int, width: int) -> int:
        """The rows of the program for so many prompts."""
        rows = 1
        while rows < prompts:
            rows *= self.row_step
        return max(prompts, min(rows, self.rows_of(width)))


class Chunk(NamedTuple):
    """Tokens ``start`` to ``end`` of a prompt, to be stored now, and the pages by which."""

    sequence: Sequence
    start: int
    end: int
    tables: Int[np.ndarray, "3 M"]  # packed pages, pages of windows, packed pages of local layers

    @property
    def last(self) -> bool:
        return self.end == len(self.sequence.prompt)


class Plan(NamedTuple):
    """What to launch in a tick: chunks by the program that runs them together, then a burst."""

    groups: list[list[Chunk]]
    decoding: list[tuple[Sequence, int]]  # and how many tokens have been drawn before, at most


class Scheduler:
    """Sequences that wait and run, and their pages."""

    def __init__(
        self,
        spec: CacheSpec,
        limits: Limits,
        *,
        window: int | None = None,
        prefix_cache: bool = True,
    ):
        """``window``: the tokens that local layers see; None without such layers."""
        self._spec, self.limits = spec, limits
        self._page, self._first = spec.page, first_page(spec)
        self._keeps_all = not spec.windowed or bool(spec.exact_layers)
        self.packed, self.exact = PagePool(limits.pages), PagePool(limits.exact_pages)
        self.local = PagePool(limits.local_pages)
        # The pages of each slot's sequence, by their numbers in it: of one pool and the others
        self.tables = np.full((3, limits.slots, limits.columns), PADDING_PAGE, np.int32)
        self._windows = self._make_windows(window)
        self.prefix = PrefixCache(
            self.packed,
            [each.pool for each in self._windows],
            grows=spec.windowed and bool(spec.exact_layers),
        )
        # A page that a chunk leaves half filled is not shared: whoever goes on writes into it.
        self._keeps = prefix_cache and limits.chunks[-1] % spec.page == 0
        self.waiting: list[Sequence] = []  # the oldest first
        self.running: list[Sequence] = []
        self._slots = list(range(limits.slots))
        self.preempted = 0

    def _make_windows(self, local: int | None) -> list[Window]:
        """Pages of windows, and those of local layers, where there are any."""
        spec, found = self._spec, []
        if spec.windowed:
            sinks, last = spec.sink_pages, lambda tokens: -(-tokens // spec.page)
            own = self.exact, self.tables[1], spec.page
            found.append(Window(*own, spec.recent, sinks, sinks, last))
        if local is not None:
            first, own = self._first, (self.local, self.tables[2], spec.page)
            found.append(
                Window(*own, local - 1, first, 0, lambda tokens: first + self._pages(tokens))
            )
        return found

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest sequence that the pool can ever hold."""
        spec, pages = self._spec, self.limits.pages - 1
        if spec.windowed and not spec.exact_layers:
            return spec.sink + spec.recent + (pages + 1) * spec.page - 1
        return pages * spec.page

    @property
    def reads(self) -> bool:
        """Whether some of a prompt is to be stored in the next tick."""
        comes = self.waiting and self._slots and not self._waits_for_company()
        return bool(comes) or any(each.state == "prefill" for each in self.running)

    @property
    def held_pages(self) -> int:
        """Pages of different tokens, however many copies there are, without tails that wait."""
        alone = {
            page
            for each in self.running
            for window, held in zip(self._windows, each.held, strict=True)
            for number, page in held.pages.items()
            if window.pool is self.exact
            and not self._first <= number < self._first + len(each.packed)
        }
        return self.packed.used + len(alone)

    def submit(self, sequence: Sequence) -> None:
        """Lets a sequence wait for its turn; it must be one that can fit."""
        if sequence.longest > self.most_tokens:
            raise ValueError(f"{sequence.longest} tokens do not fit {self.most_tokens}")
        if self._keeps:
            sequence.chunks = chunk_names(sequence.prompt, self.limits.chunks[-1])
        bisect.insort(self.waiting, sequence, key=lambda each: each.number)

    def end(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is; its pages are free for what is launched next."""
        if sequence.state == "waiting":
            self.waiting.remove(sequence)
        elif sequence.state != "ended":
            self._leave(sequence)
        sequence.state = "ended"

    def advance(self, sequence: Sequence, drawn: int) -> None:
        """Notes that so many more tokens were drawn, and lets go of pages that nobody reads now."""
        sequence.read += drawn
        if self._windows and (stored := sequence.least) >= sequence.drops_at:
            sequence.drops_at = min(
                window.advance(held, sequence.slot, stored)
                for window, held in zip(self._windows, sequence.held, strict=True)
            )

    def plan(self, steps: int) -> Plan:
        """The next tick, with a burst of up to ``steps`` tokens."""
        self._reserve(steps)
        self._admit(steps)
        groups = list(self._cut(steps))
        decoding = [(each, each.launched) for each in self.running if _goes_on(each)]
        for sequence, _ in decoding:
            sequence.launched = min(sequence.budget, sequence.launched + steps)
        return Plan(groups, decoding)

    def _reserve(self, steps: int) -> None:
        """Grants pages for a burst, to the oldest first."""
        for sequence in self.running.copy():
            end = min(sequence.longest, len(sequence.prompt) + sequence.launched - 1 + steps)
            # Others than those that go on may have been preempted for an older one.
            if end > sequence.granted and _goes_on(sequence) and not self._grant(sequence, end):
                self._preempt(sequence)

    def _grant(self, sequence: Sequence, end: int) -> bool:
        """Pages for ``end`` tokens, and for the rest of the last page."""
        end = self._to_page_end(sequence, end)
        missing = self._pages(end) - len(sequence.packed)
        if missing > self.packed.free and not self._make_room(missing, sequence):
            return False
        table = self.tables[0, sequence.slot]
        for _ in range(missing):
            table[self._first + len(sequence.packed)] = page = self.packed.take()
            sequence.packed.append(page)
        if sequence.state == "decode":
            for window, held in zip(self._windows, sequence.held, strict=True):
                first = max(held.end, window.first(sequence.least))
                self._take(window, sequence, held, range(first, window.last(end)))
        sequence.granted = end
        return True

    def _pages(self, tokens: int) -> int:
        """Packed pages for so many tokens; often asked."""
        if self._keeps_all:
            return -(-tokens // self._page)
        return max(0, tokens - self._spec.sink - self._spec.recent) // self._page

    def _to_page_end(self, sequence: Sequence, tokens: int) -> int:
        return min(sequence.longest, -(-tokens // self._page) * self._page)

    def _make_room(self, pages: int, sequence: Sequence) -> bool:
        """Frees packed pages, by preempting sequences younger than this one if need be."""
        while pages > self.packed.free and not self.prefix.make_room(pages):
            youngest = self.running[-1]
            if youngest.number <= sequence.number:
                return False
            self._preempt(youngest)
        return True

    def _take(self, window: Window, sequence: Sequence, held: Held, numbers: Iterable[int]) -> None:
        window.take(held, sequence.slot, numbers, self.prefix.make_window_room)

    def _admit(self, steps: int) -> None:
        """Lets the oldest waiting sequences run while there are slots and pages for them."""
        if self._waits_for_company():
            return
        while self.waiting and self._slots:
            sequence = self.waiting[0]
            # Some of the prompt must be left to run: the next token is drawn from its last one.
            whole = (len(sequence.prompt) - 1) // self.limits.chunks[-1]
            names = [] if sequence.scored else sequence.chunks[:whole]
            chain = self.prefix.find(names)
            if len(chain) < len(names) and self._is_coming(names[len(chain)]):
                return  # soon it need not be computed again
            shared = [page for entry in chain for page in entry.packed.values()]
            tail = chain[-1].tail if chain else None
            held = [Held(dict(pages)) for pages in tail or [{} for _ in self._windows]]
            self.packed.hold(shared)
            self._hold(held)
            end = self._to_page_end(sequence, len(sequence.prompt) + steps)
            need = self._pages(end) - len(shared)
            # A page for each that runs: who comes shall not be sent away at the next burst.
            if not self.prefix.make_room(need + len(self.running)):
                self.packed.drop(shared)
                self._let_go(held)
                return
            self.waiting.pop(0)
            self._start(sequence, shared, held, len(chain) * self.limits.chunks[-1])
            self._grant(sequence, end)

    def _waits_for_company(self) -> bool:
        """Whether who comes next waits until a program can take several prompts.

        Only while more wait than there are slots for, and nearly all slots are taken.
        """
        several = min(self.limits.rows, self.limits.slots // _SPARE, len(self.waiting))
        return len(self._slots) < several

    def _hold(self, held: list[Held]) -> None:
        for window, own in zip(self._windows, held, strict=True):
            window.pool.hold(own.pages.values())

    def _let_go(self, held: list[Held]) -> None:
        for window, own in zip(self._windows, held, strict=True):
            window.pool.drop(own.pages.values())

    def _is_coming(self, name: bytes) -> bool:
        """Whether a chunk is about to be stored for another sequence."""
        size = self.limits.chunks[-1]
        return any(
            name in each.chunks[each.stored // size :]
            for each in self.running
            if each.state == "prefill"
        )

    def _start(self, sequence: Sequence, shared: list[int], held: list[Held], stored: int):
        sequence.state, sequence.slot = "prefill", heapq.heappop(self._slots)
        sequence.stored = sequence.cached = stored
        sequence.packed, sequence.held = shared, held
        first = self._first
        self.tables[0, sequence.slot, first : first + len(shared)] = shared
        for window, own in zip(self._windows, held, strict=True):
            window.table[sequence.slot, list(own.pages)] = list(own.pages.values())
        bisect.insort(self.running, sequence, key=lambda each: each.number)

    def _cut(self, steps: int) -> Iterator[list[Chunk]]:
        """Chunks of the oldest prompts that a tick has room for, by the program that takes them.

        The widest go first: rows that their program has anyway are there for narrower ones.
        """
        room = self.limits.tick_tokens
        while due := self._due(room):
            room -= sum(width for width, _ in due)
            due.sort(key=lambda each: -each[0])
            while due:
                width = due[0][0]
                alike = sum(each[0] == width for each in due)
                rows = self.limits.padded_rows(min(alike, self.limits.rows_of(width)), width)
                yield [self._chunk(sequence, steps) for _, sequence in due[:rows]]
                due = due[rows:]

    def _due(self, room: int) -> list[tuple[int, Sequence]]:
        """The oldest prompts whose next chunks fit into so many tokens, with their widths.

        A tick that has nothing yet takes one that does not.
        """
        due: list[tuple[int, Sequence]] = []
        for sequence in self.running:
            if sequence.state != "prefill":
                continue
            width = self.width(self._next(sequence))
            if width > room and room < self.limits.tick_tokens:
                break
            due.append((width, sequence))
            room -= width
        return due

    def _next(self, sequence: Sequence) -> int:
        """Tokens of the next chunk."""
        return min(len(sequence.prompt) - sequence.stored, self.limits.chunks[-1])

    def width(self, tokens: int) -> int:
        """The width of the program for so many tokens."""
        return next(width for width in self.limits.chunks if width >= tokens)

    def _chunk(self, sequence: Sequence, steps: int) -> Chunk:
        start, end = sequence.stored, sequence.stored + self._next(sequence)
        sequence.stored = end
        last = end == len(sequence.prompt)
        read, grown = self.tables[:, sequence.slot].copy(), sequence.granted if last else end
        for window, held in zip(self._windows, sequence.held, strict=True):
            needed = set(window.numbers(end, end))
            past = [number for number in held.pages if number not in needed]
            window.drop(held, sequence.slot, past)
            self._take(window, sequence, held, window.numbers(end, grown))
        # Pages that the chunk reads and nobody after it: it reads them before it writes any.
        tables = self.tables[:, sequence.slot]
        tables = np.where(tables == PADDING_PAGE, read, tables)
        if self._keeps and end % self.limits.chunks[-1] == 0:
            self._keep(sequence, end)
        if last:
            sequence.state, sequence.launched = "decode", 1
        return Chunk(sequence, start, end, tables)

    def _keep(self, sequence: Sequence, end: int) -> None:
        """Lets others begin with what is stored of a prompt."""
        names = sequence.chunks[: end // self.limits.chunks[-1]]
        packed = dict(enumerate(sequence.packed[: self._pages(end)], self._first))
        tail = [
            {number: held.pages[number] for number in window.numbers(end, end)}
            for window, held in zip(self._windows, sequence.held, strict=True)
        ]
        self.prefix.add(names, packed, tail)

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.restart()
        self.preempted += 1
        bisect.insort(self.waiting, sequence, key=lambda each: each.number)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.packed.drop(sequence.packed)
        self._let_go(sequence.held)
        self.tables[:, sequence.slot] = PADDING_PAGE
        heapq.heappush(self._slots, sequence.slot)


def _goes_on(sequence: Sequence) -> bool:
    """Whether a burst may draw tokens of it."""
    return sequence.state == "decode" and sequence.launched < sequence.budget
