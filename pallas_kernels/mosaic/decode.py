"""decode on Hopper: a warp for every KV head and four of its query heads.

The work is cut into shares as triton/decode.py has it (work.py), and partial results are the same.
A *team* of warps has a share of some KV heads and reads its pages from a ring of slots in shared
memory (ring.py), tile by tile; what a warp does is in warp.py, with a tile in
sides/. Warps never wait for each other but for a slot. Pages of several formats, packed ones
and those of the windows, are read one after the other: each format's work is cut into equal shares,
dealt out from either end, so that little work of two formats meets in no team, and little work of
one is spread over all blocks.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jkvq.pallas_kernels.formats.codecs import LloydCodec
from jkvq.pallas_kernels.formats.packed import LayerIndex
from jkvq.pallas_kernels.mosaic.program import (
    Format,
    Program,
    ShiftNumbers,
    make_teams,
    same_threads,
    shared_bytes,
)
from jkvq.pallas_kernels.mosaic.sides.stream_keys import channel_table
from jkvq.pallas_kernels.mosaic.warp import Room, Warp
from jkvq.pallas_kernels.types import Heads
from jkvq.pallas_kernels.work import Partials, Span

_LOG2E = float(np.log2(np.e))


def decode(
    q: Float[Array, "B N H"], spans: list[Span], layer: LayerIndex, *, scale: float
) -> list[Partials]:
    """Attention over the tokens of each span, not merged yet, as triton/decode.py gives it.

    Slots past a plan's length, and pages that the plan does not name, may hold anything.
    """
    H = q.shape[2]
    programs = same_threads([_program(q, span, scale) for span in spans])
    blocks = max(-(-each.shares * each.groups // each.teams.count) for each in programs)
    programs = [
        replace(program, blocks=blocks, from_end=number % 2 == 1)
        for number, program in enumerate(programs)
    ]
    arrays = [_arrays(span) for span in spans]

    def decode_block(layer, q, *refs, slots, barriers):
        def run(_, layer, q, *refs):
            *refs, slots, barriers = refs
            inputs, outputs = refs[: -2 * len(programs)], refs[-2 * len(programs) :]
            room = Room(slots, barriers, max(each.warpgroup_bytes for each in programs))
            for number, program in enumerate(programs):
                own, inputs = inputs[: len(arrays[number])], inputs[len(arrays[number]) :]
                Warp(program, room, layer, q, own, outputs[2 * number : 2 * number + 2]).run()
                room = room.after(4 * program.barrier_words)

        all = (layer, q, *refs, slots, barriers)
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(all))(run)(*all)

    rows = [(each.shares + q.shape[0] - 1) * q.shape[1] for each in programs]
    shapes = [shape for count in rows for shape in ((count, H), (count,))]
    found = plgpu.kernel(
        decode_block,
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        scratch_types={
            "slots": plgpu.SMEM((shared_bytes(programs),), jnp.uint8),
            "barriers": plgpu.SMEM((sum(each.barrier_words for each in programs),), jnp.int32),
        },
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=programs[0].warpgroups,
        thread_name="warpgroup",
    )(jnp.asarray(layer, jnp.int32).reshape(1), q, *(x for own in arrays for x in own))
    return [
        Partials(out, lse, span.plan.shares)
        for out, lse, span in zip(found[::2], found[1::2], spans, strict=True)
    ]


def alike(q: Float[Array, "B N H"], spans: list[Span]) -> bool:
    """Whether spans lose nothing by one launch: blocks of as many warps suit them all."""
    return len({_program(q, span, 1.0).warpgroups for span in spans}) == 1


def _program(q: Float[Array, "B N H"], span: Span, scale: float) -> Program:
    """The numbers of a span."""
    (B, N, H), keys = q.shape, span.keys
    key, value = (Format.of(codec, H) for codec in span.codecs)
    heads = Heads(keys.kv_heads, N // keys.kv_heads, H)
    return Program(
        key=key,
        value=value,
        teams=make_teams(heads, keys.page, key.bytes + value.bytes),
        shape=(B, *heads),
        pages=keys.codes.shape[1],
        page=keys.page,
        shares=len(span.plan.shares.first),
        scale=scale * _LOG2E,
        shift=None if span.shift is None else ShiftNumbers.of(span.shift),
        bounded=span.plan.first is not None,
    )


def _arrays(span: Span) -> list[Array]:
    """The arrays of a span, as a warp takes them."""
    plan, shares, shift = span.plan, span.plan.shares, span.shift
    assert plan.tiles is not None
    sides = (x for side in (span.keys, span.values) for x in (side.codes, side.params))
    added = () if shift is None else (shift.queries, shift.turns, shift.number)
    order = shares.before, shares.first, shares.last, plan.length, plan.tiles
    return [*order, *(x for x in (*sides, _table(span), plan.first, *added) if x is not None)]


def _table(span: Span) -> Array | None:
    """What a warp must know of the channels of a stream."""
    codec = span.codecs[0]
    if not span.keys.stream:
        return None
    assert isinstance(codec, LloydCodec) and codec.allocation is not None
    return channel_table(codec.allocation)
