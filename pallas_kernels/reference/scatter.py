"""scatter: puts encoded tokens of any codec into their pages, by plain JAX."""

from jaxtyping import Array, Int

from jkvq.pallas_kernels.formats.packed import LayerIndex, Packed


def scatter(
    pages: Packed, new: Packed, layer: LayerIndex, page: Int[Array, "B T"], slot: Int[Array, "B T"]
) -> Packed:
    """The pages with packed token (b, t) in page ``page[b, t]``, slot ``slot[b, t]``."""
    codes, params, index = pages.codes, pages.params, pages.index
    at = (
        (layer, page, slice(None), slice(None), slot)
        if pages.stream
        else (layer, page, slice(None), slot)
    )
    codes = codes.at[at].set(new.codes, mode="promise_in_bounds")
    if params is not None:
        params = params.at[layer, page, :, :, slot].set(new.params, mode="promise_in_bounds")
    if index is not None:
        index = index.at[layer, page, slot].set(new.index, mode="promise_in_bounds")
    return Packed(codes, params, index, pages.stream)
