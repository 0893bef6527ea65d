"""scatter: puts encoded tokens of any codec into their pages, by plain JAX."""

from typing import Literal

from jaxtyping import Array, Int

from jkvq.pallas_kernels.formats.packed import LayerIndex, Packed


def scatter(
    pages: Packed,
    new: Packed,
    layer: LayerIndex,
    page: Int[Array, "B T"],
    slot: Int[Array, "B T"],
    *,
    mode: Literal["promise_in_bounds", "drop"] = "promise_in_bounds",
) -> Packed:
    """The pages with packed token (b, t) in page ``page[b, t]``, slot ``slot[b, t]``.

    ``mode``: "drop" leaves out what goes to a page that is not there.
    """
    codes, params, index = pages.codes, pages.params, pages.index
    at = (
        (layer, page, slice(None), slice(None), slot)
        if pages.stream
        else (layer, page, slice(None), slot)
    )
    codes = codes.at[at].set(new.codes, mode=mode)
    if params is not None:
        params = params.at[layer, page, :, :, slot].set(new.params, mode=mode)
    if index is not None:
        index = index.at[layer, page, slot].set(new.index, mode=mode)
    return Packed(codes, params, index, pages.stream)
