"""A batch of prompts in the cache: room for each and its new tokens, and the prefill."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from jkvq.cache import KVCache, empty_cache, page_bytes, pages_for
from jkvq.errors import UserError
from jkvq.llm import LLM
from jkvq.memory import format_bytes, free_bytes
from jkvq.pages import PADDING_PAGE, PageAllocator
from jkvq.steps import prefill_chunk

# Prompt tokens per prefill step. Prompts are cut at multiples of the largest in every batch, so
# that a text does not depend on its company; the rest is padded to the smallest that holds it.
_CHUNKS = (32, 128, 512)
_GROUP = 8  # prompts per prefill step


class Batch:
    """The cache of one call, with room for every prompt and its new tokens."""

    def __init__(self, llm: LLM, tokens: list[list[int]], budgets: list[int]):
        self.rows = power_of_two(len(tokens))
        need = [
            pages_for(len(row) + budget, llm.spec)
            for row, budget in zip(tokens, budgets, strict=True)
        ]
        pages = _pool_pages(llm, need)
        allocator = PageAllocator(pages)
        self._table = np.full((self.rows, _roomy(max(need))), PADDING_PAGE, np.int32)
        for row, count in enumerate(need):
            self._table[row, :count] = allocator.allocate(count)
        self.cache: KVCache = empty_cache(
            llm.spec, llm.config.cache_shape, pages, jnp.asarray(self._table)
        )

    def prefill(self, llm: LLM, tokens: list[list[int]]) -> jax.Array:
        """Runs the prompts, and returns the hidden state [rows, D] of each one's last token."""
        width, dtype = llm.config.width, llm.params["embedding"].dtype
        order = sorted(range(len(tokens)), key=lambda row: len(tokens[row]))
        last, lengths = jnp.zeros((self.rows, width), dtype), np.zeros(self.rows, np.int32)
        for start in range(0, len(order), _GROUP):
            rows = order[start : start + _GROUP]
            hidden = self._prefill_group(llm, rows, [tokens[row] for row in rows])
            last = last.at[np.asarray(rows)].set(hidden[: len(rows)])
            lengths[rows] = [len(tokens[row]) for row in rows]
        self.cache = dataclasses.replace(
            self.cache, block_table=jnp.asarray(self._table), length=jnp.asarray(lengths)
        )
        return last

    def _prefill_group(self, llm: LLM, rows: list[int], tokens: list[list[int]]) -> jax.Array:
        """Runs prompts of about the same length, chunk by chunk, on their rows of the table."""
        size = power_of_two(len(rows))
        table = np.full((size, self._table.shape[1]), PADDING_PAGE, np.int32)
        table[: len(rows)] = self._table[rows]
        cache = dataclasses.replace(
            self.cache, block_table=jnp.asarray(table), length=jnp.zeros(size, jnp.int32)
        )
        hidden = jnp.zeros((size, llm.config.width), llm.params["embedding"].dtype)
        longest = max(map(len, tokens))
        for start in range(0, longest, _CHUNKS[-1]):
            chunks = [row[start : start + _CHUNKS[-1]] for row in tokens]
            width = next(width for width in _CHUNKS if width >= max(map(len, chunks)))
            padded = np.zeros((size, width), np.int32)
            count = np.zeros(size, np.int32)
            for row, chunk in enumerate(chunks):
                padded[row, : len(chunk)], count[row] = chunk, len(chunk)
            cache, hidden = prefill_chunk(
                llm.config, llm.params, cache, jnp.asarray(padded), jnp.asarray(count), hidden
            )
        self.cache = cache
        return hidden


def _pool_pages(llm: LLM, need: list[int]) -> int:
    """Pages to allocate for sequences that need so many each; refuses what does not fit."""
    total = sum(need)
    if llm.pool_tokens is not None:
        room, what = llm.pool_tokens // llm.spec.page, f"the pool of {llm.pool_tokens} tokens"
    else:
        free, each = free_bytes(), page_bytes(llm.spec, llm.config.cache_shape)
        room = math.inf if free is None else max(0, int(0.9 * free) // each - 1)
        what = "the free memory" if free is None else f"{format_bytes(free)} of free memory"
    if total > room:
        fit = int(np.searchsorted(np.cumsum(sorted(need)), room, side="right"))
        page, each = llm.spec.page, page_bytes(llm.spec, llm.config.cache_shape)
        raise UserError(
            f"{len(need)} sequence(s) of up to {max(need) * page} tokens, prompt and answer, need "
            f"{format_bytes(total * each)} of cache, and {what} has room for {int(room) * page} "
            f"tokens: {fit} of them would fit; give fewer or shorter prompts, or a smaller "
            "max_new_tokens"
        )
    return 1 + int(min(_roomy(total), room))


def power_of_two(count: int, least: int = 1) -> int:
    """``count`` rounded up to a power of two, ``least`` at least."""
    return max(least, 1 << (count - 1).bit_length())


def _roomy(pages: int) -> int:
    """Rounded up to 2^k or 3 * 2^k, 16 at least: few shapes to compile, little memory unused."""
    power = power_of_two(pages, 16)
    return power * 3 // 4 if 16 < pages <= power * 3 // 4 else power
