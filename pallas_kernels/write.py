"""write: puts packed tokens into their pages, in place."""

from jaxtyping import Array, Int

from jkvq.pallas_kernels.packed import Packed


def write(
    pages: Packed, new: Packed, layer: int, page: Int[Array, "B T"], slot: Int[Array, "B T"]
) -> Packed:
    """The pages with token (b, t) stored in page ``page[b, t]``, slot ``slot[b, t]``."""
    codes, params, index = pages.codes, pages.params, pages.index
    codes = codes.at[layer, page, :, slot].set(new.codes, mode="promise_in_bounds")
    if params is not None:
        params = params.at[layer, page, :, :, slot].set(new.params, mode="promise_in_bounds")
    if index is not None:
        index = index.at[layer, page, slot].set(new.index, mode="promise_in_bounds")
    return Packed(codes, params, index)
