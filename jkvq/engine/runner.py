"""The device's side of an engine: the pools of pages, and what each slot's sequence is doing."""

from collections.abc import Sequence as Listed
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jkvq.cache.layout import KVCache, Sequences, empty_groups, table_columns
from jkvq.cache.shape import CacheShape
from jkvq.engine.sampling import SamplerArrays, Sampling, draws_of
from jkvq.engine.steps import BURST, Decoding, Drawn, decode_burst, join, prefill_chunk
from jkvq.llm import LLM
from jkvq.scheduling.scheduler import Chunk, Limits

_STOP_TOKENS = 8  # that end a sequence on the device; of more the host learns a burst later


class Start(NamedTuple):
    """How a sequence begins to draw tokens."""

    slot: int
    prompt: Listed[int]
    budget: int
    stops: Listed[int]
    sampling: Sampling
    known: int  # its first token, if that is drawn again; else -1


class Runner:
    """Launches programs over the slots of an engine; nothing here waits for the device."""

    def __init__(self, llm: LLM, limits: Limits):
        self._llm, self._limits = llm, limits
        shape, slots = CacheShape.of(llm.config), limits.slots
        self._groups = empty_groups(llm.spec, shape, limits.pages, limits.exact_pages)
        self._length: Int[Array, " B"] = jax.device_put(np.zeros(slots, np.int32))
        self._state = _state(llm, [None] * slots)
        self._sampling = [Sampling()] * slots

    def prefill(self, group: list[Chunk], width: int) -> Float[Array, "R D"]:
        """Stores a chunk of some prompts, and returns the hidden states of their last tokens."""
        llm, rows = self._llm, self._limits.padded_rows(len(group), width)
        columns = table_columns(max(chunk.end for chunk in group), llm.spec)
        tokens, count = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
        tables, length = np.zeros((2, rows, columns), np.int32), np.zeros(rows, np.int32)
        for row, (sequence, start, end, own) in enumerate(group):
            tokens[row, : end - start], count[row] = sequence.prompt[start:end], end - start
            width_of_own = min(columns, own.shape[1])
            tables[:, row, :width_of_own], length[row] = own[:, :width_of_own], start
        cache, hidden = prefill_chunk(
            *(llm.config, llm.params, llm.basis),
            self._cache(tables, jax.device_put(length)),
            jax.device_put(tokens),
            jax.device_put(count),
            llm.implementation,
        )
        self._groups = cache.groups
        return hidden

    def join(self, hidden: Float[Array, "R D"], starts: list[Start | None]) -> Drawn:
        """Draws the first tokens of prompts, row by row, and lets their slots go on from there."""
        llm, slots = self._llm, len(self._state.token)
        starts = [*starts, *[None] * (len(hidden) - len(starts))]
        ints = np.asarray(
            [
                (start.slot, len(start.prompt), start.known) if start else (slots, 0, -1)
                for start in starts
            ],
            np.int32,
        )
        for start in filter(None, starts):
            self._sampling[start.slot] = start.sampling
        slot, stored, known = (jax.device_put(column) for column in ints.T.copy())
        self._state, self._length, drawn = join(
            *(llm.config, llm.params, hidden, self._state, self._length),
            *(slot, _state(llm, starts), stored, known),
            draws_of(start.sampling for start in starts if start),
        )
        return drawn

    def burst(
        self,
        tables: Int[np.ndarray, "2 B M"],
        keep: Bool[np.ndarray, " B"],
        known: Int[np.ndarray, "B BURST"],
        steps: int,
    ) -> Drawn:
        """Draws up to ``steps`` tokens of each slot to keep."""
        llm, kept = self._llm, (self._sampling[slot] for slot in np.flatnonzero(keep))
        cache, self._state, drawn = decode_burst(
            *(llm.config, llm.params, llm.basis),
            self._cache(tables, self._length),
            *(self._state, keep, known, steps, draws_of(kept), llm.implementation),
        )
        self._groups, self._length = cache.groups, cache.sequences.length
        return drawn

    def _cache(self, tables: Int[np.ndarray, "2 B M"], length: Int[Array, " B"]) -> KVCache:
        """The pools under the tables of some sequences."""
        spec, windows = self._llm.spec, self._llm.config.windows
        packed, exact = (jax.device_put(table.copy()) for table in tables)
        sequences = Sequences(packed, exact if spec.windowed else None, length)
        return KVCache(self._groups, sequences, spec, windows)


def nothing_known(slots: int) -> Int[np.ndarray, "B BURST"]:
    """Tokens of a burst of which all are drawn by chance."""
    return np.full((slots, BURST), -1, np.int32)


def _state(llm: LLM, starts: Listed[Start | None]) -> Decoding:
    """Where sequences stand that have drawn nothing; None is a slot that nobody has."""
    rows = len(starts)
    stops = np.full((rows, _STOP_TOKENS), -1, np.int32)
    seen = np.zeros((rows, llm.config.vocab), bool)
    budget = np.zeros(rows, np.int32)
    for row, start in enumerate(starts):
        if start is not None:
            own = start.stops[:_STOP_TOKENS]
            seen[row, start.prompt], stops[row, : len(own)] = True, own
            budget[row] = start.budget
    # Made by numpy: every small array that jax.numpy makes is a program to compile.
    return Decoding(
        token=jax.device_put(np.zeros(rows, np.int32)),
        made=jax.device_put(np.zeros(rows, np.int32)),
        budget=jax.device_put(budget),
        active=jax.device_put(np.asarray([start is not None for start in starts])),
        failed=jax.device_put(np.zeros(rows, bool)),
        seen=jax.device_put(seen),
        stop_tokens=jax.device_put(stops),
        sampler=SamplerArrays.stack([start.sampling if start else Sampling() for start in starts]),
    )
