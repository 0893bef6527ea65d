"""decode on Hopper: a warp for every KV head and four of its query heads.

The work is cut into shares as triton/decode.py has it (work.py), and partial results are the same.
A *team* of warps has a share of some KV heads and reads its pages from a ring of slots in shared
memory (ring.py), tile by tile; what a warp does is in warp.py, with a
tile in affine.py and floats.py. Warps
never wait for each other but for a slot.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jkvq.pallas_kernels.formats.codecs import Codec
from jkvq.pallas_kernels.formats.packed import LayerIndex, Packed
from jkvq.pallas_kernels.mosaic.program import SLOTS, Format, Program, ShiftNumbers, make_teams
from jkvq.pallas_kernels.mosaic.warp import Warp
from jkvq.pallas_kernels.types import Heads, Shift
from jkvq.pallas_kernels.work import DecodePlan, Partials

_LOG2E = float(np.log2(np.e))


def decode(
    q: Float[Array, "B N H"],
    keys: Packed,
    values: Packed,
    key_codec: Codec,
    value_codec: Codec,
    layer: LayerIndex,
    plan: DecodePlan,
    shift: Shift | None = None,
    *,
    scale: float,
) -> Partials:
    """Attention over the tokens of a plan, not merged yet, as triton/decode.py gives it.

    Slots past the plan's length, and pages that the plan does not name, may hold anything.
    """
    B, N, H = q.shape
    K, shares = keys.kv_heads, len(plan.shares.first)
    assert plan.pages is not None
    key, value = (Format.of(codec, H) for codec in (key_codec, value_codec))
    added = []
    if shift is not None:
        added = [shift.scores, *([] if shift.number is None else [shift.number])]
    program = Program(
        key=key,
        value=value,
        teams=make_teams(Heads(K, N // K, H), keys.page, key.bytes + value.bytes),
        shape=(B, K, N // K, H),
        pages=keys.codes.shape[1],
        page=keys.page,
        shares=shares,
        scale=scale * _LOG2E,
        shift=None if shift is None else ShiftNumbers.of(shift),
    )
    teams, of = program.teams, plan.shares
    rows = (shares + B - 1) * N

    def block(*refs, slots, barriers):
        refs = (*refs, slots, barriers)
        kinds = (plgpu.RefType(),) * len(refs)
        plgpu.inline_mgpu(arg_types=kinds)(lambda _, *refs: Warp(program, *refs).run())(*refs)

    out, lse = plgpu.kernel(
        block,
        out_type=[
            jax.ShapeDtypeStruct((rows, H), jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ],
        scratch_types={
            "slots": plgpu.SMEM((teams.count * SLOTS * program.slot_bytes,), jnp.uint8),
            "barriers": plgpu.SMEM((teams.count * 4 * SLOTS,), jnp.int32),
        },
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        grid=(-(-shares * program.groups // teams.count),),
        grid_names=("block",),
        num_threads=program.warpgroups,
        thread_name="warpgroup",
    )(
        *(jnp.asarray(layer, jnp.int32).reshape(1), of.before, of.first, of.last, plan.length),
        *(plan.pages, q),
        *(x for side in (keys, values) for x in (side.codes, side.params) if x is not None),
        *added,
    )
    return Partials(out, lse, of)
