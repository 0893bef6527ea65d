"""decode, by the backend that serves best: Mosaic on Hopper where it reads the codecs, else Triton.

Which one it is shows in the plan: Mosaic wants the pages of all units in a row.
"""

import jax
from jaxtyping import Array, Float, Int

from jkvq.pallas_kernels.formats.codecs import Codec
from jkvq.pallas_kernels.formats.packed import LayerIndex, Packed
from jkvq.pallas_kernels.mosaic import decode as mosaic
from jkvq.pallas_kernels.mosaic.program import reads, share_count
from jkvq.pallas_kernels.settings import decode_settings, prefers_mosaic
from jkvq.pallas_kernels.triton import decode as triton
from jkvq.pallas_kernels.types import Heads, Implementation, Shift
from jkvq.pallas_kernels.work import DecodePlan, Partials, pages_in_order, share_work

Codecs = tuple[Codec, Codec]


def served_by_mosaic(codecs: Codecs, heads: Heads, implementation: Implementation) -> bool:
    """Whether decode runs on Mosaic here."""
    chosen = implementation == "pallas" and prefers_mosaic(codecs[0])
    return (chosen or implementation == "mosaic") and all(
        reads(codec, heads.channels) for codec in codecs
    )


def plan_decode(
    length: Int[Array, " B"],
    table: Int[Array, "B M"],
    codecs: Codecs,
    heads: Heads,
    *,
    page: int,
    implementation: Implementation,
) -> DecodePlan:
    """The plan for ``length`` tokens of each sequence in the pages of a table: for all layers."""
    if not served_by_mosaic(codecs, heads, implementation):
        return triton.plan_decode(
            length, page=page, kv_heads=heads.kv, settings=decode_settings(codecs[0])
        )
    units = -(-length // page)
    cores = getattr(jax.devices()[0], "core_count", None) or 1
    shares = share_work(units, share_count(codecs, heads, page, cores))
    return DecodePlan(length, shares, pages_in_order(shares, table))


def decode(
    q: Float[Array, "B N H"],
    keys: Packed,
    values: Packed,
    codecs: Codecs,
    layer: LayerIndex,
    table: Int[Array, "B M"],
    plan: DecodePlan,
    shift: Shift | None = None,
    *,
    scale: float,
    interpret: bool = False,
) -> Partials:
    """Attention over the tokens of a plan, not merged yet (triton/decode.py)."""
    pages = q, keys, values, *codecs, layer
    if plan.pages is not None:
        return mosaic.decode(*pages, plan, shift, scale=scale)
    return triton.decode(*pages, table, plan, shift, scale=scale, interpret=interpret)
