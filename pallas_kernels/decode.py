"""decode, by the backend that serves best: Mosaic on Hopper where it reads the codecs, else Triton.

Which one it is shows in the plan: Mosaic wants the tiles of all units in a row.
"""

import jax
from jaxtyping import Array, Float, Int

from jkvq.pallas_kernels.formats.codecs import Codec
from jkvq.pallas_kernels.formats.packed import LayerIndex
from jkvq.pallas_kernels.mosaic import decode as mosaic
from jkvq.pallas_kernels.mosaic.program import reads, share_count, tile_tokens
from jkvq.pallas_kernels.settings import decode_settings, prefers_mosaic, reads_together
from jkvq.pallas_kernels.triton import decode as triton
from jkvq.pallas_kernels.types import Heads, Implementation
from jkvq.pallas_kernels.work import (
    DecodePlan,
    Partials,
    Span,
    share_work,
    tiles_in_order,
    units_of,
)

Codecs = tuple[Codec, Codec]


def _served_by_mosaic(
    codecs: Codecs, heads: Heads, page: int, implementation: Implementation
) -> bool:
    """Whether decode runs on Mosaic here."""
    chosen = implementation == "pallas" and prefers_mosaic(codecs[0])
    return (chosen or implementation == "mosaic") and reads(codecs, heads, page)


def plan_decode(
    length: Int[Array, " B"],
    table: Int[Array, "B M"],
    codecs: Codecs,
    heads: Heads,
    *,
    page: int,
    implementation: Implementation,
    first: Int[Array, " B"] | None = None,
) -> DecodePlan:
    """The plan for ``length`` tokens of each sequence in the pages of a table: for all layers.

    ``first`` is the first of them that is seen.
    """
    if not _served_by_mosaic(codecs, heads, page, implementation):
        settings = decode_settings(codecs[0])
        sizes = {"page": page, "kv_heads": heads.kv, "settings": settings}
        return triton.plan_decode(length, first=first, **sizes)
    tile = tile_tokens(codecs, heads, page)
    cores = getattr(jax.devices()[0], "core_count", None) or 1
    units, skipped = units_of(length, first, tile)
    shares = share_work(units, share_count(codecs, heads, page, cores))
    tiles = tiles_in_order(shares, table, page // tile, skipped)
    return DecodePlan(length, shares, tiles, first=first)


def decode(
    q: Float[Array, "B N H"],
    spans: list[Span],
    layer: LayerIndex,
    *,
    scale: float,
    interpret: bool = False,
    together: bool | None = None,
) -> list[Partials]:
    """Attention over the tokens of the spans, not merged yet (triton/decode.py).

    ``together``: in one launch, where Mosaic reads them all; None does what is tuned, unless the
    spans are too unlike.
    """
    by_mosaic = all(span.plan.tiles is not None for span in spans)
    if together is None:
        together = by_mosaic and reads_together() and mosaic.alike(q, spans)
    if together and by_mosaic:
        return mosaic.decode(q, spans, layer, scale=scale)
    found = []
    for span in spans:
        if span.plan.tiles is not None:
            found += mosaic.decode(q, [span], layer, scale=scale)
            continue
        keys, values, codecs, *reads = span
        pages = keys, values, *codecs, layer, *reads
        found.append(triton.decode(q, *pages, scale=scale, interpret=interpret))
    return found
