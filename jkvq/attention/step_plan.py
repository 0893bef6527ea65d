"""What all layers of a step share, made once and passed to them.

A step runs T new tokens of each sequence. Where they stand, where they are written, what each query
reads, and who does how much of that work depend on lengths and tables alone: a plan holds it, for
each group of layers that are stored alike.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float16, Int

from jkvq.attention.page_means import number_pages, page_of_position
from jkvq.cache.basis import Angles, Basis, SideBasis
from jkvq.cache.layout import KVCache, layer_groups, page_of
from jkvq.cache.page_pool import PADDING_PAGE
from jkvq.cache.specs.spec import CacheSpec
from jkvq.cache.windows import (
    Leaving,
    held_positions,
    leaving,
    seen_exactly,
    slot_of,
    window_table,
)
from jkvq.pallas_kernels.formats.codecs import FloatCodec
from jkvq.pallas_kernels.settings import decode_settings
from jkvq.pallas_kernels.types import Implementation
from jkvq.pallas_kernels.work import DecodePlan, plan_decode

# "prefill": a chunk of a prompt sees itself as computed and what came before it as stored.
# "decode": one new token of each sequence sees everything, itself too, as stored.
# "forced": tokens that are known, each as if decode had drawn it: how evaluation sees a text.
Phase = Literal["prefill", "decode", "forced"]

WINDOW_CODEC = FloatCodec(jnp.float16)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunk:
    """T new tokens of each sequence; the first ``count`` of a row are real, the rest padding."""

    position: Int[Array, "B T"]  # in the sequence
    count: Int[Array, " B"]

    @property
    def real(self) -> Bool[Array, "B T"]:
        return jnp.arange(self.position.shape[1])[None] < self.count[:, None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Targets:
    """Where tokens are written: page and slot; the padding page where one is not real."""

    page: Int[Array, "B T"]
    slot: Int[Array, "B T"]
    real: Bool[Array, "B T"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowPlan:
    """Of the 16-bit windows of a group.

    table: the pages of each sequence's windows.
    position: of the tokens in their slots before the step; negative where there is none.
    leaving: which of them the new tokens drive out, and into which packed page and slot.
    source: the window's page and slot from which they leave.
    new: where the first new token goes.
    angles: where the means of the tokens in the slots stand; None without means that turn.
    """

    table: Int[Array, "B n"]
    position: Int[Array, "B W"]
    leaving: Leaving
    packed: Targets
    source: Targets
    new: Targets
    angles: Angles | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeReads:
    """Who reads what in the kernels' decode: of packed pages, and of the windows' pages.

    number: by slot of the windows, the page whose mean its token is stored without.
    """

    packed: DecodePlan
    window: DecodePlan | None
    number: Int[Array, "B W"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupPlan:
    """A step's plan for the layers that are stored alike.

    boundary: packed tokens that each query reads from their codes; later ones it reads exactly.
    write: where the chunk's own tokens go in packed pages, if they do.
    token_angles: where the mean of each new token's page stands; None without means that turn.
    wide_angles: the same as kernels take them.
    page_angles: of all pages: those of the sink, of packed and of recent tokens.
    """

    boundary: Int[Array, "B T"]
    write: Targets
    windows: WindowPlan | None
    token_angles: Angles | None
    wide_angles: tuple[Float16[Array, "B T H"], Float16[Array, "B T H"]] | None
    page_angles: Angles | None
    reads: DecodeReads | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepPlan:
    """What all layers of a step share."""

    chunk: Chunk
    groups: tuple[GroupPlan, ...]  # as the cache has them


def plan_step(
    cache: KVCache,
    basis: Basis,
    count: Int[Array, " B"],
    width: int,
    *,
    phase: Phase,
    implementation: Implementation,
) -> StepPlan:
    """The plan for the next ``count`` tokens of each sequence, in arrays of ``width`` tokens."""
    offset = jnp.arange(width, dtype=jnp.int32)[None, :]
    chunk = Chunk(cache.length[:, None] + offset, count)
    kernels = implementation != "reference" and phase == "decode"
    groups = (
        _plan_group(cache, group.spec, basis.layer(group.layers[0])[0], chunk, phase, kernels)
        for group in layer_groups(cache.spec, cache.layers)
    )
    return StepPlan(chunk, tuple(groups))


def _plan_group(
    cache: KVCache, spec: CacheSpec, key: SideBasis, chunk: Chunk, phase: Phase, kernels: bool
) -> GroupPlan:
    table = cache.block_table
    known = chunk.position + 1 if phase != "prefill" else cache.length[:, None]
    boundary = jnp.where(chunk.real, spec.packed(known), 0)
    windows, index, packs = None, chunk.position - spec.sink, chunk.real
    if spec.windowed:
        windows = _plan_windows(cache, spec, key, chunk)
        packs = packs & (index >= 0) & (index < windows.leaving.after)
    write = Targets(*page_of(table, index, packs, spec.page), packs)
    token_angles = key.angles(spec.middle(chunk.position))
    wide = None if token_angles is None or not kernels else token_angles.wide
    pages = number_pages(spec, table.shape[1])
    page_angles = key.angles(spec.page_middle(pages))
    reads = _plan_reads(cache, spec, key, chunk, boundary) if kernels else None
    return GroupPlan(boundary, write, windows, token_angles, wide, page_angles, reads)


def _plan_windows(cache: KVCache, spec: CacheSpec, key: SideBasis, chunk: Chunk) -> WindowPlan:
    table, at = window_table(spec, cache.row), chunk.position

    def place(slot, real) -> Targets:
        page = jnp.take_along_axis(table, slot // spec.page, axis=1)
        return Targets(jnp.where(real, page, PADDING_PAGE), slot % spec.page, real)

    goes = leaving(spec, cache.length, chunk.count, at.shape[1])
    slot = jnp.where(at < spec.sink, at, slot_of(spec, at - spec.sink))
    packed = Targets(*page_of(cache.block_table, goes.index, goes.leaves, spec.page), goes.leaves)
    position = held_positions(spec, cache.length)
    return WindowPlan(
        table=table,
        position=position,
        leaving=goes,
        packed=packed,
        source=place(slot_of(spec, goes.index), goes.leaves),
        new=place(slot[:, :1], chunk.real[:, :1]),
        angles=key.angles(spec.middle(position)),
    )


def _plan_reads(
    cache: KVCache, spec: CacheSpec, key: SideBasis, chunk: Chunk, boundary: Int[Array, "B 1"]
) -> DecodeReads:
    kv_heads, page = cache.groups[0].key.kv_heads, spec.page
    plan = functools.partial(plan_decode, page=page, kv_heads=kv_heads)
    packed = plan(boundary[:, 0], settings=decode_settings(key.codec(0)))
    if not spec.windowed:
        return DecodeReads(packed, None, None)
    length = cache.length + chunk.count
    position = held_positions(spec, length)
    seen = seen_exactly(spec, position, boundary)[:, 0] & chunk.real
    used = jnp.minimum(length, spec.sink + spec.recent + page)  # slots fill in order
    window = plan(used, settings=decode_settings(WINDOW_CODEC), seen=seen)
    number = page_of_position(spec, position, cache.block_table.shape[1])
    return DecodeReads(packed, window, number)
