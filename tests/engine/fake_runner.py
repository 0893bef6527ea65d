"""A device made of dictionaries: it stores who each token is, and checks all that a step reads.

A token is known by a hash of itself and all before it. Pages hold those; a step that reads a page
finds the token that belongs there, or the test fails. The token that follows is a function of the
hash, so that a text is what `expected_text` says, whatever happened on the way.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from jkvq.cache.specs.spec import CacheSpec
from jkvq.engine.runner import Start
from jkvq.engine.steps import BURST, Drawn
from jkvq.scheduling.scheduler import Chunk, Limits
from tests.tiny import EOS


def _after(before: int, token: int) -> int:
    return hash((before, token)) >> 1  # as numpy's integers hold it


def _next_token(name: int) -> int:
    """What is drawn after a token: now and then the end."""
    return EOS if name % 97 == 0 else name % EOS


def names(tokens) -> list[int]:
    """Who each token is."""
    found, name = [], 0
    for token in tokens:
        name = _after(name, token)
        found.append(name)
    return found


def expected_text(prompt, budget: int) -> list[int]:
    """What is drawn after a prompt."""
    text, name = [], names(prompt)[-1]
    while len(text) < budget and (not text or text[-1] != EOS):
        text.append(_next_token(name))
        name = _after(name, text[-1])
    return text


@dataclass
class _Row:
    """What a slot is doing."""

    stored: list[int]  # who is stored
    token: int  # the newest, not stored
    made: int
    budget: int
    active: bool


class FakeRunner:
    """Does what `jkvq.engine.runner.Runner` does."""

    def __init__(self, spec: CacheSpec, limits: Limits, window: int | None = None):
        self.spec, self.limits, self.window = spec, limits, window
        self.local, self.local_whole = np.zeros((2, limits.local_pages, spec.page), np.int64)
        self.packed, self.whole = np.zeros((2, limits.pages, spec.page), np.int64)
        self.exact = np.zeros((limits.exact_pages, spec.page), np.int64)
        self.rows: dict[int, _Row] = {}
        self._names = functools.cache(names)

    def prefill(self, group: list[Chunk], width: int) -> tuple[list[int], None]:
        assert len(group) <= self.limits.rows
        held, who = [], [self._names(tuple(chunk.sequence.prompt)) for chunk in group]
        for chunk, own in zip(group, who, strict=True):  # all are read before any is written
            self._check(own[: chunk.start], chunk.tables, chunk.start)
            held.append(self._due(chunk.tables, chunk.start, chunk.end))
        for chunk, own, due in zip(group, who, held, strict=True):
            assert 0 < chunk.end - chunk.start <= width
            self._pack(due)
            self._write(range(chunk.start, chunk.end), own, chunk.tables, chunk.end)
        return [own[chunk.end - 1] for chunk, own in zip(group, who, strict=True)], None

    def join(self, hidden: list[int], starts: list[Start | None]) -> Drawn:
        tokens, count = np.zeros((len(hidden), 1), np.int32), np.zeros(len(hidden), np.int32)
        active = np.zeros(len(hidden), bool)
        for row, (name, start) in enumerate(zip(hidden, starts, strict=True)):
            if start is not None:
                token = _next_token(name)
                assert start.known in (-1, token)
                goes_on = token != EOS and start.budget > 1
                stored = list(self._names(tuple(start.prompt)))
                self.rows[start.slot] = _Row(stored, token, 1, start.budget, goes_on)
                tokens[row], count[row], active[row] = token, 1, goes_on
        return _drawn(tokens, count, active)

    def burst(self, tables, keep, known, steps: int, allowed: None) -> Drawn:
        slots = len(keep)
        tokens, count = np.zeros((slots, BURST), np.int32), np.zeros(slots, np.int32)
        for slot, row in self.rows.items():
            row.active &= bool(keep[slot])
            if row.active:
                length = len(row.stored)
                self._pack(self._due(tables[:, slot], length, length + steps))
        for step in range(steps):
            for slot, row in self.rows.items():
                if row.active:
                    self._step(row, tables[:, slot])
                    assert known[slot, step] in (-1, row.token)
                    tokens[slot, step], count[slot] = row.token, count[slot] + 1
        active = np.asarray([slot in self.rows and self.rows[slot].active for slot in range(slots)])
        return _drawn(tokens, count, active)

    def _step(self, row: _Row, tables) -> None:
        at = len(row.stored)
        row.stored.append(_after(row.stored[-1], row.token))
        self._write([at], row.stored, tables, 0 if self.spec.windowed else at + 1)
        self._check(row.stored, tables, at)
        row.token = _next_token(row.stored[-1])
        row.made += 1
        row.active = row.token != EOS and row.made < row.budget

    def _is_packed(self, at, length: int):
        """Which tokens a step reads in packed pages when there are so many."""
        behind = at - self.spec.sink
        return (behind >= 0) & (behind < self.spec.packed(length)) | (not self.spec.windowed)

    def _places(self, at):
        return at // self.spec.page, at % self.spec.page

    def _write(self, positions, who: list[int], tables, length: int) -> None:
        """Stores tokens, each in the pool where it is read when there are ``length`` of them."""
        at = np.asarray(positions)
        number, slot = self._places(at)
        own, packed = np.asarray(who)[at], self._is_packed(at, length)
        for pool, table, here in (
            (self.packed, tables[0], packed),
            (self.exact, tables[1], ~packed),
            (self.whole, tables[0], np.full(at.shape, bool(self.spec.exact_layers))),
        ):
            assert table[number[here]].all(), "a page that was not granted"
            pool[table[number[here]], slot[here]] = own[here]
        if self.window is None:
            return
        seen = at > max(length, int(at[-1]) + 1) - self.window  # by a query that comes later
        for pool, whole in ((self.local, packed), (self.local_whole, np.full_like(packed, True))):
            if pool is self.local or self.spec.exact_layers:
                here = seen & whole
                assert tables[2][number[here]].all(), "a page that was not granted"
                pool[tables[2][number[here]], slot[here]] = own[here]

    def _due(self, tables, length: int, end: int):
        """What is packed before there are ``end`` tokens: where to, and who."""
        first, last = (self.spec.sink + self.spec.packed(n) for n in (length, end))
        at = np.arange(first, max(first, min(last, length)) if self.spec.windowed else first)
        number, slot = self._places(at)
        granted = tables[0][number] > 0  # else nobody will read it: the sequence ends before
        number, slot = number[granted], slot[granted]
        assert tables[1][number].all(), "a page that was not granted"
        own = tables[0][number], tables[2][number] if self.window else 0
        return *own, slot, self.exact[tables[1][number], slot]

    def _pack(self, due) -> None:
        page, local, slot, who = due
        self.packed[page, slot] = who
        if self.window:
            self.local[local, slot] = who

    def _check(self, stored: list[int], tables, position: int) -> None:
        """That all tokens are found where a query at a position looks for them."""
        at, who = np.arange(len(stored)), np.asarray(stored, np.int64)
        number, slot = self._places(at)
        packed = self._is_packed(at, len(stored))
        found = np.where(
            packed, self.packed[tables[0][number], slot], self.exact[tables[1][number], slot]
        )
        assert (found == who).all(), "another token than the one that belongs there"
        if self.spec.exact_layers:
            assert (self.whole[tables[0][number], slot] == who).all()
        if self.window is not None:
            seen = at > position - self.window
            found = np.where(packed, self.local[tables[2][number], slot], found)
            assert (found == who)[seen].all(), "a token of the window is not there"
            if self.spec.exact_layers:
                assert (self.local_whole[tables[2][number], slot] == who)[seen].all()


def _drawn(tokens, count, active) -> Drawn:
    logprobs = np.zeros(tokens.shape, np.float32)
    host: Any = tokens, logprobs, count, active, np.zeros(len(count), bool)
    return Drawn(*host)
