"""write: puts the keys and values of T new tokens per sequence into their pages, in place."""

from jaxtyping import Array, Float, Int


def write(
    key_pages: Float[Array, "L P K p H"],
    value_pages: Float[Array, "L P K p H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    layer: int,
    page: Int[Array, "B T"],
    slot: Int[Array, "B T"],
) -> tuple[Float[Array, "L P K p H"], Float[Array, "L P K p H"]]:
    """The pages with token (b, t) stored at ``[layer, page[b, t], :, slot[b, t]]``."""

    def scatter(pages, new):
        return (
            pages.at[layer, page, :, slot].set(new.astype(pages.dtype), mode="promise_in_bounds")
        )

    return scatter(key_pages, k), scatter(value_pages, v)
