"""write: puts the keys and values of T new tokens per sequence into their pages, in place."""

from jaxtyping import Array, Float, Int, UInt

from jkvq.pallas_kernels.words import to_words


def write(
    key_pages: UInt[Array, "L P K p H"],
    value_pages: UInt[Array, "L P K p H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    layer: int,
    page: Int[Array, "B T"],
    slot: Int[Array, "B T"],
) -> tuple[UInt[Array, "L P K p H"], UInt[Array, "L P K p H"]]:
    """The pages with token (b, t) stored at ``[layer, page[b, t], :, slot[b, t]]``."""

    def scatter(pages, new):
        words = to_words(new, pages.dtype)
        return pages.at[layer, page, :, slot].set(words, mode="promise_in_bounds")

    return scatter(key_pages, k), scatter(value_pages, v)
