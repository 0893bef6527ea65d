"""What all layers of a step share, made once and passed to them.

A step runs T new tokens of each sequence. Where they stand, where they are written, what each query
reads, and who does how much of that work depend on lengths and tables alone: a plan holds it, for
each group of layers that are stored alike.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float16, Int

from jkvq.attention.page_means import page_of_position
from jkvq.cache.basis import Angles, Basis, SideBasis
from jkvq.cache.exact_pages import window_codec
from jkvq.cache.layout import GroupSpec, Sequences, layer_groups, page_of
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.page_rule import in_whole_pages
from jkvq.cache.specs.spec import CacheSpec
from jkvq.pallas_kernels.formats.codecs import Codec
from jkvq.pallas_kernels.types import Heads, Implementation
from jkvq.pallas_kernels.work import DecodePlan

# "prefill": a chunk of a prompt sees itself as computed and what came before it as stored.
# "decode": one new token of each sequence sees everything, itself too, as stored.
# "forced": tokens that are known, each as if decode had drawn it: how evaluation sees a text.
Phase = Literal["prefill", "decode", "forced"]


class Kernels(NamedTuple):
    """Which kernels run a step, for which heads."""

    heads: Heads
    implementation: Implementation


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
class PackPlan:
    """Tokens that are due to be packed: where they lie in pages of windows, and where they go."""

    source: Targets
    to: Targets


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExactPlan:
    """Of the pages of windows of a group.

    What is read of them stands side by side: the pages of the sink, then those from the end of the
    packed tokens on. Decode reads the new token there too, a chunk only what was there before.

    table: the pages that are read.
    count: tokens in them.
    position: of these tokens; negative where there is none.
    new: where the chunk's tokens go, if they stay in windows.
    angles: where the means of the tokens stand; None without means that turn.
    """

    table: Int[Array, "B n"]
    count: Int[Array, " B"]
    position: Int[Array, "B W"]
    new: Targets
    angles: Angles | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeReads:
    """Who reads what in the kernels' decode: of packed pages, and of pages of windows.

    number: of each slot of the latter, the page whose mean its token is stored without.
    """

    packed: DecodePlan
    exact: DecodePlan | None
    number: Int[Array, "B W"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupPlan:
    """A step's plan for the layers that are stored alike.

    table: of the pages that may be packed: those behind the sink.
    boundary: packed tokens that each query reads from their codes; later ones it reads exactly.
    oldest: the position of the first token that each query sees; None where it sees all.
    write: where the chunk's own tokens go in packed pages; None where decode leaves that to later.
    pack: what is due to be packed before the chunk's tokens come; None where that is done.
    token_angles: where the mean of each new token's page stands; None without means that turn.
    wide_angles: the same as kernels take them.
    reads: who reads what, where kernels decode.
    page_angles: of all pages of a sequence.
    """

    table: Int[Array, "B m"]
    boundary: Int[Array, "B T"]
    oldest: Int[Array, "B T"] | None
    write: Targets | None
    exact: ExactPlan | None
    pack: PackPlan | None
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


@functools.partial(
    jax.jit, static_argnames=("spec", "shape", "group", "width", "phase", "implementation")
)
def plan_step(
    sequences: Sequences,
    basis: Basis,
    count: Int[Array, " B"],
    first: Int[Array, ""] | int = 0,
    *,
    spec: CacheSpec,
    shape: CacheShape,
    group: int,
    width: int,
    phase: Phase,
    implementation: Implementation,
) -> StepPlan:
    """The plan for the next ``count`` tokens of each sequence, in arrays of ``width`` tokens.

    ``first`` is the rotary position of a sequence's first token, ``group`` the number of query
    heads of each KV head. Kernels take known tokens one by one: such a step's plan is those of its
    tokens, stacked.
    """
    heads = Heads(shape.kv_heads, group, shape.head_dim)
    kernels = None if implementation == "reference" else Kernels(heads, implementation)
    how = {"of_spec": layer_groups(spec, shape.layers, shape.windows), "kernels": kernels}
    if phase != "forced" or kernels is None:
        plan = _plan(sequences, basis, count, width=width, phase=phase, **how)
    else:
        token = jnp.arange(width, dtype=jnp.int32)[:, None]
        before, real = jnp.minimum(token, count[None]), (token < count[None]).astype(jnp.int32)

        def plan_token(now):
            stored = sequences.longer_by(now[0])
            return _plan(stored, basis, now[1], width=1, phase="decode", packs=True, **how)

        plan = jax.lax.map(plan_token, (before, real))
    chunk, groups = plan
    columns = sequences.block_table.shape[1]
    groups = (
        dataclasses.replace(group, page_angles=_page_angles(of.spec, basis, of.layers[0], columns))
        for group, of in zip(groups, how["of_spec"], strict=True)
    )
    position = sequences.length[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    return StepPlan(chunk, tuple(groups), position + first)


def _page_angles(spec: CacheSpec, basis: Basis, layer: int, columns: int) -> Angles | None:
    return basis.layer(layer)[0].angles(spec.page_middle(jnp.arange(columns)))


def _plan(
    sequences,
    basis,
    count,
    *,
    width: int,
    of_spec: tuple[GroupSpec, ...],
    phase: Phase,
    kernels: Kernels | None,
    packs: bool = False,
) -> tuple[Chunk, tuple[GroupPlan, ...]]:
    """A plan without the angles of pages, which are the same at any length."""
    offset = jnp.arange(width, dtype=jnp.int32)[None, :]
    chunk = Chunk(sequences, sequences.length[:, None] + offset, count)
    groups = (
        _plan_group(group, basis.layer(group.layers[0]), chunk, phase, kernels, packs)
        for group in of_spec
    )
    return chunk, tuple(groups)


def _plan_group(
    group: GroupSpec,
    sides: tuple[SideBasis, SideBasis],
    chunk: Chunk,
    phase: Phase,
    kernels: Kernels | None,
    packs: bool,
) -> GroupPlan:
    (key, _), spec = sides, group.spec
    sequences, decodes = chunk.sequences, phase == "decode"
    pages = sequences.packed_table(group.window)
    known = chunk.position + 1 if phase != "prefill" else sequences.length[:, None]
    boundary = jnp.where(chunk.real, spec.packed(known), 0)
    exact, pack, write = None, None, None
    if spec.windowed:
        exact = _plan_exact(spec, key, chunk, decodes)
        if packs or not decodes:
            pack = plan_packing(group, sequences, chunk.count, chunk.position.shape[1])
    if not (spec.windowed and decodes):
        end = spec.sink + spec.packed(sequences.length + chunk.count)[:, None]
        here = chunk.real & (chunk.position >= spec.sink) & (chunk.position < end)
        if phase == "prefill" and group.window is not None:  # what nobody after it sees has no page
            last = (sequences.length + chunk.count)[:, None]
            here &= chunk.position > last - group.window
        write = Targets(*page_of(pages, chunk.position, here, spec.page), here)
    token_angles = key.angles(spec.middle(chunk.position))
    oldest = None if group.window is None else chunk.position - group.window + 1
    table, wide, reads = pages[:, spec.sink_pages :], None, None
    if kernels is not None and decodes:
        wide = None if token_angles is None else token_angles.wide
        codecs = key.codec(0), sides[1].codec(0)
        reads = _plan_reads(spec, kernels, codecs, boundary, table, exact, oldest)
    return GroupPlan(table, boundary, oldest, write, exact, pack, token_angles, wide, reads)


def plan_packing(
    group: GroupSpec, sequences: Sequences, count: Int[Array, " B"], most: int
) -> PackPlan:
    """What must be packed before a sequence has ``count`` more tokens, at most ``most``."""
    spec = group.spec
    assert sequences.exact_table is not None
    first, end = (
        spec.sink + spec.packed(length)[:, None]
        for length in (sequences.length, sequences.length + count)
    )
    tokens = min(spec.recent + spec.page, in_whole_pages(most, spec.page))
    position = first + jnp.arange(tokens, dtype=jnp.int32)[None]
    due = (position < end) & (position < sequences.length[:, None])
    source, to = (
        Targets(*page_of(table, position, due, spec.page), due)
        for table in (sequences.exact_table, sequences.packed_table(group.window))
    )
    return PackPlan(source, to)


def _plan_exact(spec: CacheSpec, key: SideBasis, chunk: Chunk, decodes: bool) -> ExactPlan:
    sequences, table = chunk.sequences, chunk.sequences.exact_table
    assert table is not None
    after = sequences.length + chunk.count
    packed = spec.packed(after if decodes else sequences.length)
    count = (after if decodes else sequences.length) - packed
    number = jnp.arange(spec.exact_pages, dtype=jnp.int32)[None]
    behind = packed[:, None] // spec.page
    column = jnp.where(number < spec.sink_pages, number, number + behind)
    rank = jnp.arange(spec.exact_pages * spec.page, dtype=jnp.int32)[None]
    position = jnp.where(rank < spec.sink, rank, rank + packed[:, None])
    at, end = chunk.position, spec.sink + spec.packed(after)[:, None]
    stays = chunk.real & ((at < spec.sink) | (at >= end))
    return ExactPlan(
        table=jnp.take_along_axis(table, jnp.clip(column, 0, table.shape[1] - 1), axis=1),
        count=count,
        position=jnp.where(rank < count[:, None], position, -1),
        new=Targets(*page_of(table, at, stays, spec.page), stays),
        angles=None if decodes else key.angles(spec.middle(position)),
    )


def first_seen(
    spec: CacheSpec, oldest: Int[Array, " B"], packed: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """The first token seen of the packed ones of each sequence, and of those in windows."""
    exact = jnp.where(oldest < spec.sink, oldest, jnp.maximum(spec.sink, oldest - packed))
    return jnp.maximum(oldest - spec.sink, 0), exact


def _plan_reads(
    spec: CacheSpec,
    kernels: Kernels,
    codecs: tuple[Codec, Codec],
    boundary: Int[Array, "B 1"],
    table: Int[Array, "B m"],
    exact: ExactPlan | None,
    oldest: Int[Array, "B 1"] | None,
) -> DecodeReads:
    from jkvq.pallas_kernels.decode import plan_decode  # noqa: PLC0415 (loads the kernels)

    plan = functools.partial(
        plan_decode, heads=kernels.heads, page=spec.page, implementation=kernels.implementation
    )
    count, first, first_exact = boundary[:, 0], None, None
    if oldest is not None:
        first, first_exact = first_seen(spec, jnp.maximum(oldest[:, 0], 0), count)
    packed = plan(count, table, codecs, first=first)
    if exact is None:
        return DecodeReads(packed, None, None)
    key, value = map(window_codec, spec.window_sides)
    window = plan(exact.count, exact.table, (key, value), first=first_exact)
    pages = table.shape[1] + spec.sink_pages
    return DecodeReads(packed, window, page_of_position(spec, exact.position, pages))
