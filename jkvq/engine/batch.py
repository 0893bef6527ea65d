"""A batch of prompts in the cache: room for each and its new tokens, and the prefill."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkvq.cache.layout import (
    KVCache,
    Sequences,
    empty_cache,
    fill_table,
    pages_for,
    pages_of_window,
    stored_bytes,
    table_columns,
)
from jkvq.cache.page_pool import (
    PADDING_PAGE,
    PageAllocator,
    power_of_two,
    roomy_pool,
)
from jkvq.cache.shape import CacheShape
from jkvq.engine.steps import prefill_chunk
from jkvq.llm import LLM
from jkvq.support.errors import UserError
from jkvq.support.memory import format_bytes, free_bytes

# Prompt tokens per prefill step. Prompts are cut at multiples of the largest in every batch, so
# that a text does not depend on its company; the rest is padded to the smallest that holds it. A
# GPU takes shorter ones as fast as its host can launch them.
_CHUNKS = {"cpu": (32, 128, 512), "gpu": (32, 128, 512, 2048)}
_GROUP = 8  # prompts per prefill step


class Batch:
    """The cache of one call, with room for every prompt and its new tokens."""

    def __init__(self, llm: LLM, tokens: list[list[int]], budgets: list[int]):
        self.rows = power_of_two(len(tokens))
        lengths = [len(row) + budget for row, budget in zip(tokens, budgets, strict=True)]
        pages = _pool_pages(llm, lengths, self.rows)
        allocator = PageAllocator(pages)
        own = [allocator.allocate(pages_for(length, llm.spec)) for length in lengths]
        own += [[]] * (self.rows - len(own))
        self._table = fill_table(llm.spec, own, table_columns(max(lengths), llm.spec))
        self.cache: KVCache = empty_cache(
            llm.spec, CacheShape.of(llm.config), pages, jax.device_put(self._table)
        )
        exact_table = self.cache.sequences.exact_table
        self._exact_table = None if exact_table is None else np.asarray(exact_table)

    def prefill(self, llm: LLM, tokens: list[list[int]]) -> jax.Array:
        """Runs the prompts, and returns the hidden state [rows, 1, D] of each one's last token."""
        order = sorted(range(len(tokens)), key=lambda row: len(tokens[row]))
        place, lengths, found = *np.zeros((2, self.rows), np.int32), []
        for start in range(0, len(order), _GROUP):
            rows = order[start : start + _GROUP]
            place[rows] = sum(map(len, found)) + np.arange(len(rows))
            lengths[rows] = [len(tokens[row]) for row in rows]
            found.append(self._prefill_group(llm, rows, [tokens[row] for row in rows]))
        self._select(np.arange(self.rows), lengths)
        return _chosen(tuple(found), jax.device_put(place))

    def _prefill_group(self, llm: LLM, rows: list[int], tokens: list[list[int]]) -> jax.Array:
        """Runs prompts of about the same length, chunk by chunk, on their rows of the cache."""
        size = power_of_two(len(rows))
        row = np.full(size, -1)  # padding has none
        row[: len(rows)] = rows
        self._select(row, np.zeros(size, np.int32))
        dtype = llm.params["embedding"].dtype
        hidden = jax.device_put(np.zeros((size, 1, llm.config.width), dtype))
        widths = _CHUNKS.get(jax.default_backend(), _CHUNKS["cpu"])
        for start in range(0, max(map(len, tokens)), widths[-1]):
            chunks = [row[start : start + widths[-1]] for row in tokens]
            width = next(width for width in widths if width >= max(map(len, chunks)))
            padded = np.zeros((size, width), np.int32)
            count = np.zeros(size, np.int32)
            for at, chunk in enumerate(chunks):
                padded[at, : len(chunk)], count[at] = chunk, len(chunk)
            self.cache, hidden = prefill_chunk(
                llm.config,
                llm.params,
                llm.basis,
                self.cache,
                jax.device_put(padded),
                jax.device_put(count),
                hidden,
                llm.implementation,
            )
        return hidden

    def _select(self, rows: np.ndarray, length: np.ndarray) -> None:
        """Turns the cache to some of its sequences; -1 is padding."""

        def of_rows(table: np.ndarray | None) -> jax.Array | None:
            if table is None:
                return None
            return jax.device_put(np.where(rows[:, None] < 0, PADDING_PAGE, table[rows]))

        tables = of_rows(self._table), of_rows(self._exact_table)
        now = Sequences(*tables, jax.device_put(length))  # pyright: ignore[reportArgumentType]
        self.cache = dataclasses.replace(self.cache, sequences=now)


@jax.jit
def _chosen(parts: tuple[Float[Array, "_ 1 D"], ...], place: Int[Array, " B"]):
    """Rows of all parts, in this order."""
    return jnp.concatenate(parts)[place]


def _pool_pages(llm: LLM, lengths: list[int], rows: int) -> int:
    """Pages to allocate for sequences of these lengths; refuses what does not fit."""
    spec, shape = llm.spec, CacheShape.of(llm.config)
    need = [pages_for(length, spec) for length in lengths]
    page = stored_bytes(spec, shape, 1, 0)
    window = stored_bytes(spec, shape, 0, pages_of_window(spec))
    padding = stored_bytes(spec, shape, 1, 1)
    if llm.pool_tokens is not None:
        room = llm.pool_tokens // spec.page * page
        what = f"the pool of {llm.pool_tokens} tokens"
        cost = [-(-length // spec.page) * page for length in lengths]  # the pool counts tokens
    else:
        free = free_bytes()
        room = math.inf if free is None else 0.9 * free - padding - (rows - len(need)) * window
        what = "the free memory" if free is None else f"{format_bytes(free)} of free memory"
        cost = [pages * page + window for pages in need]
    if sum(cost) > room:
        fit = int(np.searchsorted(np.cumsum(sorted(cost)), room, side="right"))
        raise UserError(
            f"{len(need)} sequence(s) of up to {max(lengths)} tokens, prompt and answer, need "
            f"{format_bytes(sum(cost))} of cache, and {what} has room for "
            f"{format_bytes(max(room, 0))}: {fit} of them would fit; give fewer or shorter "
            "prompts, or a smaller max_new_tokens"
        )
    spare = math.inf if room == math.inf else (room - sum(cost)) // page
    return 1 + int(min(roomy_pool(sum(need), spec.page), sum(need) + spare))
