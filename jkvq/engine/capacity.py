"""How many pages an engine has: as many as memory allows, or as a call needs."""

import math
from collections.abc import Sequence

import jax
import numpy as np

from jkvq.cache.layout import (
    pages_for,
    pages_of_local,
    pages_of_window,
    stored_bytes,
    table_columns,
)
from jkvq.cache.shape import CacheShape
from jkvq.cache.sizes import power_of_two, roomy_pool
from jkvq.llm import LLM
from jkvq.scheduling.scheduler import Limits
from jkvq.support.arguments import INT32, number, whole
from jkvq.support.errors import UserError
from jkvq.support.memory import format_bytes, free_bytes

# Prompt tokens per chunk, by device.
_CHUNKS = {"cpu": (32, 128, 256), "gpu": (32, 128, 256, 512, 1024, 2048)}
_TICK_TOKENS = {"cpu": 512, "gpu": 4096}
_SLOTS = {"cpu": 8, "gpu": 64}
# Prompts per prefill step: of one call, and of many requests. With one a text is the same in any
# company; with several, rounding may turn a code. A GPU has stored 1,024 tokens sooner than its
# host has launched the next program, so there many short prompts go together.
_ROWS = {"cpu": 8, "gpu": 32}
_SERVING_ROWS = {"cpu": 1, "gpu": 32}
_ROW_STEP = {"cpu": 2, "gpu": 8}  # a GPU has time for padding, and its programs compile for long
_TAILS = 8  # ends of stored prompts that have room beside the windows of all slots


def _here(by_device: dict):
    return by_device.get(jax.default_backend(), by_device["cpu"])


def engine_limits(
    llm: LLM, *, memory: float, pages: int | None, slots: int | None, prefill_rows: int
) -> Limits:
    """The sizes of an engine that serves whoever comes.

    Args:
        llm: the model with its cache.
        memory: the part of the free memory that the pools may take.
        pages: of the pool of packed pages, if not as many as memory allows.
        slots: sequences that run at once; by default 8 on a CPU and 64 on a GPU.
        prefill_rows: prompts that one program takes a chunk of.
    """
    memory = number("memory", memory, 0.01, 1, "the part of the free memory to take, 0.01 to 1")
    slots = _here(_SLOTS) if slots is None else slots
    slots = whole("slots", slots, 1, 4096, "sequences that run at once, 1 to 4096")
    rows = whole("prefill_rows", prefill_rows, 1, 64, "prompts per prefill step, 1 to 64")
    spec, shape = llm.spec, CacheShape.of(llm.config)
    exact = slots * pages_of_window(spec) + _TAILS * (spec.recent // spec.page)
    local = (slots + _TAILS) * pages_of_local(spec, shape.window)
    if pages is not None:
        pages = whole("pages", pages, 1, INT32, f"pages of {spec.page} tokens, 1 or more")
    else:
        pages = slots * pages_for(llm.config.context, spec)
        free = free_bytes()
        if free is not None:
            windows = stored_bytes(spec, shape, 1, 1 + exact, 1 + local)
            page = stored_bytes(spec, shape, 1, 0)  # 0 where all layers have a window
            if windows + page > memory * free:
                raise UserError(
                    f"the windows of {slots} sequences alone need {format_bytes(windows + page)}, "
                    f"and {memory:.0%} of the free memory is {format_bytes(memory * free)}: give "
                    "fewer slots"
                )
            pages = min(
                pages, _round_down(int((memory * free - windows) // page)) if page else pages
            )
        if llm.pool_tokens is not None:
            pages = min(pages, max(1, llm.pool_tokens // spec.page))
    return _limits(llm, slots, (1 + pages, 1 + exact, 1 + local), llm.config.context, rows)


def serving_limits(llm: LLM, memory: float, slots: int | None) -> Limits:
    """The sizes of an engine that serves many requests, of a batch or of a server."""
    rows = _here(_SERVING_ROWS)
    return engine_limits(llm, memory=memory, pages=None, slots=slots, prefill_rows=rows)


def _round_down(pages: int) -> int:
    """To four significant bits: programs are compiled for the sizes of pools, and kept."""
    return pages >> (unit := max(0, pages.bit_length() - 4)) << unit


def call_limits(llm: LLM, lengths: Sequence[int]) -> Limits:
    """The sizes of an engine for sequences of these lengths, all at once.

    Refuses what does not fit.
    """
    spec, shape, slots = llm.spec, CacheShape.of(llm.config), power_of_two(len(lengths))
    need = [pages_for(length, spec) for length in lengths]
    page = stored_bytes(spec, shape, 1, 0)
    local = pages_of_local(spec, shape.window)
    window = stored_bytes(spec, shape, 0, pages_of_window(spec), local)
    padding = stored_bytes(spec, shape, 1, 1, 1)
    if llm.pool_tokens is not None:
        room = llm.pool_tokens // spec.page * page
        what = f"the pool of {llm.pool_tokens} tokens"
        cost = [-(-length // spec.page) * page for length in lengths]  # the pool counts tokens
    else:
        free = free_bytes()
        room = math.inf if free is None else 0.9 * free - padding - (slots - len(need)) * window
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
    spare = math.inf if room == math.inf or not page else (room - sum(cost)) // page
    pages = 1 + int(min(roomy_pool(sum(need), spec.page), sum(need) + spare))
    windows = 1 + slots * pages_of_window(spec), 1 + slots * local
    return _limits(llm, slots, (pages, *windows), max(lengths), _here(_ROWS))


def _limits(llm: LLM, slots: int, pages: tuple[int, int, int], longest: int, rows: int) -> Limits:
    """With so many packed pages, pages of windows, and pages of local layers."""
    packed, exact, local = pages
    return Limits(
        slots=slots,
        pages=packed,
        exact_pages=exact,
        local_pages=local,
        columns=table_columns(longest, llm.spec),
        chunks=_here(_CHUNKS),
        rows=rows,
        tick_tokens=_here(_TICK_TOKENS),
        row_step=_here(_ROW_STEP),
    )


def pools_bytes(llm: LLM, limits: Limits) -> int:
    """Bytes of the pools of an engine."""
    pages = limits.pages, limits.exact_pages, limits.local_pages
    return stored_bytes(llm.spec, CacheShape.of(llm.config), *pages)


def page_bytes(llm: LLM) -> tuple[int, int, int, int]:
    """Bytes of a page of each pool, and of as many tokens in a cache of 16 bits."""
    spec, shape = llm.spec, CacheShape.of(llm.config)
    packed, exact, local = (
        stored_bytes(spec, shape, *pages) for pages in ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    )
    return packed, exact, local, 2 * spec.page * shape.elements_per_token
