"""decode: attention of one query token per sequence over its stored tokens, straight from codes.

    out[b] = sum_s softmax_s(scale * (q[b] . k[s] + shift[b, s])) v[s]

The work of all sequences is cut into equal shares (work.py), one program each per KV head, which
reads its pages as tiles (tiles.py) with a running softmax and leaves a partial result for every
sequence of its share. ``merge_partials`` joins those of one or more such calls. The plan of the
work is the same for all layers: make it once a step.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from jkvq.pallas_kernels.formats.codecs import Codec
from jkvq.pallas_kernels.formats.packed import LayerIndex, Packed
from jkvq.pallas_kernels.settings import ROWS
from jkvq.pallas_kernels.triton.tiles import Page, codec_operands, make_tiles, numbers_of
from jkvq.pallas_kernels.types import DecodeSettings, Shift
from jkvq.pallas_kernels.work import DecodePlan, Partials, share_start, share_work, units_of

_LOG2E = float(np.log2(np.e))
_NOTHING = -1e30  # the greatest score before there is one
_MERGE_TILE = 2048  # numbers of partial results that are merged at once


def plan_decode(
    length: Int[Array, " B"],
    *,
    page: int,
    kv_heads: int,
    settings: DecodeSettings,
    first: Int[Array, " B"] | None = None,
) -> DecodePlan:
    """The plan for sequences of ``length`` tokens in pages of ``page``: the same for all layers."""
    units, _ = units_of(length, first, page)
    shares = share_work(units, max(1, settings.programs // kv_heads))
    return DecodePlan(length, shares, settings=settings, first=first)


def decode(
    q: Float[Array, "B N H"],
    keys: Packed,
    values: Packed,
    key_codec: Codec,
    value_codec: Codec,
    layer: LayerIndex,
    block_table: Int[Array, "B M"],
    plan: DecodePlan,
    shift: Shift | None = None,
    *,
    scale: float,
    interpret: bool = False,
) -> Partials:
    """Attention over the tokens of a plan, not merged yet.

    Slots past the plan's length, and pages that the block table does not name, may hold
    anything.
    """
    B, N, H = q.shape
    K = keys.kv_heads
    shares, settings = len(plan.shares.first), plan.settings
    assert settings is not None
    program = _Program(
        key=numbers_of(key_codec),
        value=numbers_of(value_codec),
        group=N // K,
        shares=shares,
        page=keys.page,
        scale=scale * _LOG2E,
        first=0 if shift is None else shift.first,
        exact_query=q.dtype == jnp.bfloat16,
        interpret=interpret,
    )
    inputs = {
        "layer": jnp.asarray(layer, jnp.int32).reshape(1),
        "plan": plan,
        "table": block_table,
        "q": q,
        "key": codec_operands(keys, key_codec),
        "value": codec_operands(values, value_codec),
        "shift": None if shift is None else (shift.scores, shift.number),
    }
    # Programs store whole tiles of rows, of which the last are masked: leave room for them.
    rows = (shares + B - 1) * N + ROWS
    out, lse = pl.pallas_call(
        program.run,
        grid=(K, shares),
        in_specs=[jax.tree.map(lambda _: pl.no_block_spec, inputs)],
        out_specs=[pl.no_block_spec, pl.no_block_spec],
        out_shape=[
            jax.ShapeDtypeStruct((rows, H), jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=settings.warps, num_stages=settings.stages),
        interpret=interpret,
        name="decode",
    )(inputs)
    return Partials(out, lse, plan.shares)


@dataclass(frozen=True)
class _Program:
    """The kernel, and the numbers it is compiled for."""

    key: Codec
    value: Codec
    group: int  # query heads per KV head
    shares: int
    page: int
    scale: float  # of scores to base 2
    first: int  # the number of the first page's shift
    exact_query: bool  # whether it is in bfloat16
    interpret: bool

    def run(self, inputs: dict, out_ref, lse_ref):
        """One share of one KV head."""
        head, share = pl.program_id(0), pl.program_id(1)
        shares, N = inputs["plan"].shares, inputs["q"].shape[1]
        mine = jnp.arange(ROWS, dtype=jnp.int32) < self.group

        def sequence(b, done):
            norm, lse, tiles = self._attend(inputs, head, share, b)
            row = (share + b) * N + head * self.group
            for channel, tile in tiles:
                at = out_ref.at[pl.ds(row, ROWS), pl.ds(channel, tile.shape[1])]
                plt.store(at, tile / norm[:, None], mask=mine[:, None])
            plt.store(lse_ref.at[pl.ds(row, ROWS)], lse, mask=mine)
            return done

        lax.fori_loop(shares.first[share], shares.last[share] + 1, sequence, 0)

    def _attend(self, inputs: dict, head, share, b):
        """The softmax's sum, lse and output tiles of what a share has of a sequence."""
        H, p = inputs["q"].shape[2], self.page
        layer, plan, shift = inputs["layer"][0], inputs["plan"], inputs["shift"]
        keys, values = (
            make_tiles(
                codec, inputs[side], H, head, exact_query=self.exact_query, interpret=self.interpret
            )
            for side, codec in (("key", self.key), ("value", self.value))
        )
        before, length = plan.shares.before, plan.length[b]
        total = before[before.shape[0] - 1]
        start, stop = (share_start(share + i, total, self.shares) for i in (0, 1))
        skipped = 0 if plan.first is None else plan.first[b] // p
        first = jnp.maximum(start - before[b], 0) + skipped
        last = jnp.minimum(stop, before[b + 1]) - before[b] + skipped
        row = jnp.minimum(lax.broadcasted_iota(jnp.int32, (ROWS, 1), 0), self.group - 1)

        def load_query(channel):
            q = inputs["q"][b, head * self.group + row, channel[None]]
            return q.astype(jnp.float32)

        query = keys.query(load_query, self.scale)

        def shift_of(i):
            """Of page i, or of the last one where that is past the end: [ROWS, 1 or p]."""
            if shift is None:
                return None
            scores, numbers = shift
            if numbers is None:
                number = jnp.full(1, self.first + i, jnp.int32)
            else:
                slot = i * p + jnp.arange(p, dtype=jnp.int32)
                number = numbers[b, jnp.minimum(slot, numbers.shape[1] - 1)]
            number = jnp.minimum(number, scores.shape[2] - 1)
            return scores[b, head * self.group + row, number[None]]

        def one_page(i, carry):
            top, norm, acc, by = carry
            after = shift_of(i + 1)  # a page ahead, as nothing hides how long a load takes
            page = inputs["table"][b, i]
            key, value = (Page(inputs[side], (layer, page, head), p) for side in ("key", "value"))
            token = i * p + jnp.arange(p, dtype=jnp.int32)
            real = token < length
            if plan.first is not None:
                real &= token >= plan.first[b]
            scores = keys.scores(query, key)
            if by is not None:
                scores = scores + self.scale * by
            scores = jnp.where(real[None], scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(1))
            decay = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - new_top[:, None])
            acc = values.add(acc, weights, decay, value, real)
            return new_top, norm * decay + weights.sum(1), acc, after

        nothing = jnp.full(ROWS, _NOTHING, jnp.float32), jnp.zeros(ROWS, jnp.float32)
        start = (*nothing, values.zero(), shift_of(first))
        top, norm, acc, _ = lax.fori_loop(first, last, one_page, start)
        lse = top + jnp.log(norm) * _LOG2E
        return jnp.where(norm > 0, norm, 1.0), lse, values.finish(acc)


def merge_partials(
    parts: list[Partials], query_heads: int, dtype=jnp.float32, *, interpret: bool = False
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
    """(out, lse) of all parts together, in ``dtype`` and in float32; computed in float32.

    A query that sees no token gets (0, -inf).
    """
    B, H = len(parts[0].shares.count), parts[0].out.shape[1]
    each = max(len(part.shares.first) for part in parts) / B + 1  # partial results, on average
    rows = min(64, max(8, pl.next_power_of_2(math.ceil(each))))
    width = min(H, _MERGE_TILE // rows)
    inputs = [(part.shares.partial, part.shares.count, part.out, part.lse) for part in parts]
    return pl.pallas_call(
        functools.partial(_merge_kernel, rows=rows, width=width),
        grid=(B, query_heads, H // width),
        in_specs=[jax.tree.map(lambda _: pl.no_block_spec, inputs)],
        out_specs=[
            pl.BlockSpec((None, None, width), lambda b, n, c: (b, n, c)),
            pl.BlockSpec((None, None), lambda b, n, c: (b, n)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((B, query_heads, H), dtype),
            jax.ShapeDtypeStruct((B, query_heads), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="merge_partials",
    )(inputs)


def _merge_kernel(parts, merged_ref, merged_lse_ref, *, rows: int, width: int):
    b, n, c = (pl.program_id(axis) for axis in range(3))
    N = pl.num_programs(1)
    column = c * width + lax.broadcasted_iota(jnp.int32, (1, width), 1)
    carry = jnp.float32(_NOTHING), jnp.float32(0), jnp.zeros(width, jnp.float32)
    for partial_ref, count_ref, out_ref, lse_ref in parts:
        first, count = partial_ref[b], count_ref[b]

        def tile(i, carry, first=first, count=count, out_ref=out_ref, lse_ref=lse_ref):
            top, norm, acc = carry
            index = i * rows + jnp.arange(rows, dtype=jnp.int32)
            row = (first + jnp.minimum(index, count - 1)) * N + n
            lse = jnp.where(index < count, lse_ref[row], -jnp.inf)
            new_top = jnp.maximum(top, lse.max())
            decay, weight = jnp.exp2(top - new_top), jnp.exp2(lse - new_top)
            acc = acc * decay + (out_ref[row[:, None], column] * weight[:, None]).sum(0)
            return new_top, norm * decay + weight.sum(), acc

        carry = lax.fori_loop(0, pl.cdiv(count, rows), tile, carry)
    top, norm, acc = carry
    merged_ref[...] = (acc / jnp.where(norm > 0, norm, 1.0)).astype(merged_ref.dtype)
    merged_lse_ref[...] = jnp.log(norm) + top / _LOG2E
