"""What all layers of a step share, made once and passed to them.

A step runs T new tokens of each sequence. Where they stand, where they are written, what each query
reads, and who does how much of that work depend on lengths and tables alone: a plan holds it, for
each group of layers that are stored alike.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float16, Int

from jkvq.attention.page_means import number_pages, page_of_position
from jkvq.cache.basis import Angles, Basis, SideBasis
from jkvq.cache.layout import Sequences, layer_groups, page_of
from jkvq.cache.page_pool import PADDING_PAGE
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec import CacheSpec
from jkvq.cache.windows import (
    Leaving,
    held_positions,
    leaving,
    seen_exactly,
    slot_of,
    window_slots,
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

    sequences: Sequences  # as they stand before
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
    slot: of the tokens that are not packed before the step, in their order.
    angles: where the means of those stand; None without means that turn.
    """

    table: Int[Array, "B n"]
    position: Int[Array, "B W"]
    leaving: Leaving
    packed: Targets
    source: Targets
    new: Targets
    slot: Int[Array, "B W"]
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
    reads: who reads what, where kernels decode.
    page_angles: of all pages: those of the sink, of packed and of recent tokens.
    """

    boundary: Int[Array, "B T"]
    write: Targets
    windows: WindowPlan | None
    token_angles: Angles | None
    wide_angles: tuple[Float16[Array, "B T H"], Float16[Array, "B T H"]] | None
    reads: DecodeReads | None
    page_angles: Angles | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepPlan:
    """What all layers of a step share."""

    chunk: Chunk
    groups: tuple[GroupPlan, ...]  # as the cache has them
    rotary: Int[Array, "B T"]  # rotary positions


@functools.partial(jax.jit, static_argnames=("spec", "shape", "width", "phase", "implementation"))
def plan_step(
    sequences: Sequences,
    basis: Basis,
    count: Int[Array, " B"],
    first: Int[Array, ""] | int = 0,
    *,
    spec: CacheSpec,
    shape: CacheShape,
    width: int,
    phase: Phase,
    implementation: Implementation,
) -> StepPlan:
    """The plan for the next ``count`` tokens of each sequence, in arrays of ``width`` tokens.

    ``first`` is the rotary position of a sequence's first token. Kernels take known tokens one by
    one: such a step's plan is those of its tokens, stacked.
    """
    how = {"spec": spec, "shape": shape, "kernels": implementation != "reference"}
    if phase != "forced" or not how["kernels"]:
        plan = _plan(sequences, basis, count, width=width, phase=phase, **how)
    else:
        token = jnp.arange(width, dtype=jnp.int32)[:, None]
        before, real = jnp.minimum(token, count[None]), (token < count[None]).astype(jnp.int32)

        def plan_token(now):
            return _plan(sequences.longer_by(now[0]), basis, now[1], width=1, phase="decode", **how)

        plan = jax.lax.map(plan_token, (before, real))
    chunk, groups = plan
    columns = sequences.block_table.shape[1]
    groups = (
        dataclasses.replace(group, page_angles=_page_angles(of.spec, basis, of.layers[0], columns))
        for group, of in zip(groups, layer_groups(spec, shape.layers), strict=True)
    )
    position = sequences.length[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    return StepPlan(chunk, tuple(groups), position + first)


def _page_angles(spec: CacheSpec, basis: Basis, layer: int, columns: int) -> Angles | None:
    return basis.layer(layer)[0].angles(spec.page_middle(number_pages(spec, columns)))


def _plan(
    sequences, basis, count, *, width: int, spec, shape, phase: Phase, kernels: bool
) -> tuple[Chunk, tuple[GroupPlan, ...]]:
    """A plan without the angles of pages, which are the same at any length."""
    offset = jnp.arange(width, dtype=jnp.int32)[None, :]
    chunk = Chunk(sequences, sequences.length[:, None] + offset, count)
    groups = (
        _plan_group(group.spec, shape, basis.layer(group.layers[0])[0], chunk, phase, kernels)
        for group in layer_groups(spec, shape.layers)
    )
    return chunk, tuple(groups)


def _plan_group(
    spec: CacheSpec, shape: CacheShape, key: SideBasis, chunk: Chunk, phase: Phase, kernels: bool
) -> GroupPlan:
    sequences = chunk.sequences
    known = chunk.position + 1 if phase != "prefill" else sequences.length[:, None]
    boundary = jnp.where(chunk.real, spec.packed(known), 0)
    windows, index, packs = None, chunk.position - spec.sink, chunk.real
    if spec.windowed:
        windows = _plan_windows(spec, key, chunk)
        packs = packs & (index >= 0) & (index < windows.leaving.after)
    write = Targets(*page_of(sequences.block_table, index, packs, spec.page), packs)
    token_angles = key.angles(spec.middle(chunk.position))
    decodes = kernels and phase == "decode"
    wide = None if token_angles is None or not decodes else token_angles.wide
    reads = _plan_reads(spec, shape, key, chunk, boundary) if decodes else None
    return GroupPlan(boundary, write, windows, token_angles, wide, reads)


def _plan_windows(spec: CacheSpec, key: SideBasis, chunk: Chunk) -> WindowPlan:
    sequences, at = chunk.sequences, chunk.position
    table = window_table(spec, sequences.row)

    def place(slot, real) -> Targets:
        page = jnp.take_along_axis(table, slot // spec.page, axis=1)
        return Targets(jnp.where(real, page, PADDING_PAGE), slot % spec.page, real)

    goes = leaving(spec, sequences.length, chunk.count, at.shape[1])
    slot = jnp.where(at < spec.sink, at, slot_of(spec, at - spec.sink))
    to = page_of(sequences.block_table, goes.index, goes.leaves, spec.page)
    rank = jnp.arange(window_slots(spec), dtype=jnp.int32)[None]
    index = spec.packed(sequences.length)[:, None] + rank - spec.sink
    return WindowPlan(
        table=table,
        position=held_positions(spec, sequences.length),
        leaving=goes,
        packed=Targets(*to, goes.leaves),
        source=place(slot_of(spec, goes.index), goes.leaves),
        new=place(slot[:, :1], chunk.real[:, :1]),
        slot=jnp.where(rank < spec.sink, rank, slot_of(spec, index)),
        angles=key.angles(spec.middle(jnp.where(rank < spec.sink, rank, index + spec.sink))),
    )


def _plan_reads(
    spec: CacheSpec, shape: CacheShape, key: SideBasis, chunk: Chunk, boundary: Int[Array, "B 1"]
) -> DecodeReads:
    plan = functools.partial(plan_decode, page=spec.page, kv_heads=shape.kv_heads)
    packed = plan(boundary[:, 0], settings=decode_settings(key.codec(0)))
    if not spec.windowed:
        return DecodeReads(packed, None, None)
    length = chunk.sequences.length + chunk.count
    position = held_positions(spec, length)
    seen = seen_exactly(spec, position, boundary)[:, 0] & chunk.real
    used = jnp.minimum(length, spec.sink + spec.recent + spec.page)  # slots fill in order
    window = plan(used, settings=decode_settings(WINDOW_CODEC), seen=seen)
    number = page_of_position(spec, position, chunk.sequences.block_table.shape[1])
    return DecodeReads(packed, window, number)
