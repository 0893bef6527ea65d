"""The device's side of an engine: the pools of pages, and what each slot's sequence is doing."""

import dataclasses
from collections.abc import Sequence as Listed
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jkvq.cache.layout import KVCache, LayerGroup, Sequences, empty_groups, table_columns
from jkvq.cache.shape import CacheShape
from jkvq.engine.capacity import pools_bytes
from jkvq.engine.drawing.adjust import Adjust, all_allowed
from jkvq.engine.drawing.scores import Scored
from jkvq.engine.sampling import SamplerArrays, Sampling, draws_of
from jkvq.engine.steps import BURST, Decoding, Drawn, decode_burst, join, prefill_chunk
from jkvq.llm import LLM
from jkvq.models.decoder import without_layers
from jkvq.scheduling.scheduler import Chunk, Limits
from jkvq.support.errors import UserError
from jkvq.support.memory import format_bytes, ran_out

_STOP_TOKENS = 8  # that end a sequence on the device; of more the host learns a burst later


class Start(NamedTuple):
    """How a sequence begins to draw tokens."""

    slot: int
    prompt: Listed[int]
    budget: int
    stops: Listed[int]
    sampling: Sampling
    known: int  # its first token, if that is drawn again; else -1
    tops: bool  # tell the likeliest tokens too
    allowed: Int[np.ndarray, " W"] | None  # by its grammar, a bit for each token

    @property
    def adjusts(self) -> bool:
        """Whether more is done with its scores than with everyone's."""
        return self.sampling.adjusts or self.allowed is not None


class Runner:
    """Launches programs over the slots of an engine; once made it does not wait for the device."""

    def __init__(self, llm: LLM, limits: Limits):
        self._llm, self._limits = llm, limits
        slots = limits.slots
        self._groups = _pools(llm, limits)
        self._length: Int[Array, " B"] = jax.device_put(np.zeros(slots, np.int32))
        self._state = jax.device_put(_state(llm, [None] * slots))
        self._starts: list[Start | None] = [None] * slots  # of who is in a slot, or was

    def prefill(self, group: list[Chunk], width: int) -> tuple[Float[Array, "R D"], Scored | None]:
        """Stores a chunk of some prompts, and returns the hidden states of their last tokens.

        If one of them is to be scored, so are all.
        """
        llm, rows = self._llm, self._limits.padded_rows(len(group), width)
        columns = table_columns(max(chunk.end for chunk in group), llm.spec)
        tokens, count = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
        tables, length = np.zeros((3, rows, columns), np.int32), np.zeros(rows, np.int32)
        for row, (sequence, start, end, own) in enumerate(group):
            tokens[row, : end - start], count[row] = sequence.prompt[start:end], end - start
            width_of_own = min(columns, own.shape[1])
            tables[:, row, :width_of_own], length[row] = own[:, :width_of_own], start
        cache, hidden, scored = prefill_chunk(
            *(llm.config, llm.params, llm.basis),
            self._cache(tables, jax.device_put(length)),
            jax.device_put(tokens),
            jax.device_put(count),
            llm.implementation,
            _following(group, tokens) if any(chunk.sequence.scored for chunk in group) else None,
        )
        self._groups = cache.groups
        return hidden, scored

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
        asked = [start for start in starts if start]
        for start in asked:
            self._starts[start.slot] = start
        slot, stored, known = ints.T.copy()
        new = _state(llm, starts)
        if self._adjusted(any(start.adjusts for start in asked)):
            new = dataclasses.replace(new, adjust=_adjust(llm, starts))
        self._state, self._length, drawn = join(
            *(llm.config, without_layers(llm.params), hidden, self._state, self._length),
            *(slot, new, stored, known),
            *(draws_of(start.sampling for start in asked), any(start.tops for start in asked)),
        )
        return drawn

    def burst(
        self,
        tables: Int[np.ndarray, "3 B M"],
        keep: Bool[np.ndarray, " B"],
        known: Int[np.ndarray, "B BURST"],
        steps: int,
        allowed: Int[np.ndarray, "B W"] | None = None,
    ) -> Drawn:
        """Draws up to ``steps`` tokens of each slot to keep.

        allowed: a bit for each token that may be drawn, if some slots have a grammar; then there is
            one step.
        """
        llm, kept = (
            self._llm,
            [start for slot in np.flatnonzero(keep) if (start := self._starts[slot])],
        )
        adjust = self._state.adjust if any(start.adjusts for start in kept) else None
        if adjust is not None and allowed is not None:
            adjust = dataclasses.replace(adjust, allowed=jax.device_put(allowed))
        self._state = dataclasses.replace(self._state, adjust=adjust)
        cache, self._state, drawn = decode_burst(
            *(llm.config, llm.params, llm.basis),
            self._cache(tables, self._length),
            *(self._state, keep, known, steps, draws_of(start.sampling for start in kept)),
            *(llm.implementation, any(start.tops for start in kept)),
        )
        self._groups, self._length = cache.groups, cache.sequences.length
        return drawn

    def _adjusted(self, asked: bool) -> bool:
        """Whether scores are adjusted: from now on if that is ``asked`` for."""
        if asked and self._state.adjust is None:
            nobody = _adjust(self._llm, [None] * len(self._state.token))
            self._state = dataclasses.replace(self._state, adjust=nobody)
        return self._state.adjust is not None

    def _cache(self, tables: Int[np.ndarray, "3 B M"], length: Int[Array, " B"]) -> KVCache:
        """The pools under the tables of some sequences."""
        spec, windows = self._llm.spec, self._llm.config.windows
        has = True, spec.windowed, bool(windows)
        packed, exact, local = jax.device_put(
            [table.copy() if there else None for table, there in zip(tables, has, strict=True)]
        )
        assert packed is not None
        sequences = Sequences(packed, exact, length, local)
        return KVCache(self._groups, sequences, spec, windows)


def nothing_known(slots: int) -> Int[np.ndarray, "B BURST"]:
    """Tokens of a burst of which all are drawn by chance."""
    return np.full((slots, BURST), -1, np.int32)


def _pools(llm: LLM, limits: Limits) -> tuple[LayerGroup, ...]:
    """The pools of pages; refuses them where the device has less room than it says."""
    pages = limits.pages, limits.exact_pages, limits.local_pages
    try:
        return jax.block_until_ready(empty_groups(llm.spec, CacheShape.of(llm.config), *pages))
    except jax.errors.JaxRuntimeError as error:
        if not ran_out(error):
            raise
        need = format_bytes(pools_bytes(llm, limits))
        raise UserError(
            f"the cache of {limits.slots} sequences needs {need}, "
            "and the device has no room for it: another program may hold its memory (nvidia-smi "
            "shows it); end that one, or give fewer slots or a smaller part of the memory"
        ) from None


def _following(group: list[Chunk], tokens: Int[np.ndarray, "R T"]) -> Int[Array, "R T"]:
    """The token behind each of a chunk; behind the prompt there is none."""
    following = np.zeros_like(tokens)
    for row, (sequence, start, end, _) in enumerate(group):
        behind = sequence.prompt[start + 1 : end + 1]
        following[row, : len(behind)] = behind
    return jax.device_put(following)


def _state(llm: LLM, starts: Listed[Start | None]) -> Decoding:
    """Where sequences stand that have drawn nothing, in numpy; None is a slot that nobody has."""
    rows = len(starts)
    arrays: dict[str, Any] = {
        "token": np.zeros(rows, np.int32),
        "made": np.zeros(rows, np.int32),
        "budget": np.zeros(rows, np.int32),
        "active": np.asarray([start is not None for start in starts]),
        "failed": np.zeros(rows, bool),
        "seen": np.zeros((rows, llm.config.vocab), bool),
        "stop_tokens": np.full((rows, _STOP_TOKENS), -1, np.int32),
    }
    for row, start in enumerate(starts):
        if start is not None:
            stops = start.stops[:_STOP_TOKENS]
            arrays["stop_tokens"][row, : len(stops)] = stops
            arrays["seen"][row, start.prompt] = True
            arrays["budget"][row] = start.budget
    return Decoding(**arrays, sampler=SamplerArrays.stack(_sampling(starts)))


def _adjust(llm: LLM, starts: Listed[Start | None]) -> Adjust:
    allowed = all_allowed(len(starts), llm.config.vocab)
    for row, start in enumerate(starts):
        if start is not None and start.allowed is not None:
            allowed[row] = start.allowed
    return Adjust.start(_sampling(starts), allowed, llm.config.vocab)


def _sampling(starts: Listed[Start | None]) -> list[Sampling]:
    return [start.sampling if start else Sampling() for start in starts]
