"""What a model and its cache take of memory."""

import bisect
from dataclasses import dataclass

from jkvq.cache.layout import pages_for, pages_of_local, pages_of_window, stored_bytes
from jkvq.cache.shape import CacheShape
from jkvq.cache.sizes import power_of_two, roomy_pool
from jkvq.cache.specs.spec import CacheSpec
from jkvq.models.config import ModelConfig
from jkvq.support.errors import UserError


@dataclass(frozen=True)
class Footprint:
    """Bytes, unless a name says otherwise."""

    weights: int
    per_packed_token: float  # over all layers without a window, keys and values
    window: int  # of each sequence, beside its pages
    per_sequence: int  # of the stated context, in whole pages
    bits_per_element: float  # of such a sequence: everything stored counts
    cache: int  # of the whole batch
    total: int
    fits: int | None  # sequences of the stated context beside the weights in the stated memory
    # Of a single sequence there, whatever context the model was made for; None, too, where all
    # layers have a window, which holds no more for a longer one.
    fits_tokens: int | None


def footprint(
    config: ModelConfig,
    spec: CacheSpec,
    *,
    weights: int,
    context: int,
    batch: int,
    memory: int | None,
) -> Footprint:
    """The memory of ``batch`` sequences of ``context`` tokens, as it is allocated.

    Args:
        config: of the model.
        spec: of its cache.
        weights: bytes of the model's parameters.
        context: tokens of each sequence.
        batch: sequences.
        memory: bytes that there are for everything; None where nobody knows.
    """
    if not 1 <= context <= config.context:
        raise UserError(f"context={context}: this model takes 1 to {config.context} tokens")
    if batch < 1:
        raise UserError(f"batch={batch}: at least 1 is needed")
    shape = CacheShape.of(config)
    spec.check(shape.layers, shape.head_dim, config.context, shape.latent)
    cache = pool_bytes(spec, shape, context, batch)
    room = None if memory is None else memory - weights
    return Footprint(
        weights=weights,
        per_packed_token=stored_bytes(spec, shape, 1, 0) / spec.page,
        window=_window_bytes(spec, shape, 0, 1),
        per_sequence=sequence_bytes(spec, shape, context),
        bits_per_element=bits_per_element(spec, shape, context),
        cache=cache,
        total=weights + cache,
        fits=None if room is None else _fitting(spec, shape, context, room),
        fits_tokens=None if room is None else _fitting_tokens(spec, shape, room),
    )


def pool_bytes(
    spec: CacheSpec, shape: CacheShape, context: int, batch: int, *, spare: bool = True
) -> int:
    """The cache of a batch as it is allocated: pages with some to spare, windows, padding."""
    pages = batch * pages_for(context, spec)
    pages = roomy_pool(pages, spec.page) if spare else pages
    return _window_bytes(spec, shape, 1 + pages, power_of_two(batch), padding=1)


def _window_bytes(
    spec: CacheSpec, shape: CacheShape, pages: int, slots: int, *, padding: int = 0
) -> int:
    """So many packed pages, and the windows of so many sequences."""
    each = pages_of_window(spec), pages_of_local(spec, shape.window)
    return stored_bytes(spec, shape, pages, *(padding + slots * own for own in each))


def _fitting(spec: CacheSpec, shape: CacheShape, context: int, room: int) -> int:
    """The most sequences whose cache fits, with nothing to spare."""
    most = max(0, room) // sequence_bytes(spec, shape, context)
    sizes = range(1, most + 1)
    return bisect.bisect_right(
        sizes, room, key=lambda batch: pool_bytes(spec, shape, context, batch, spare=False)
    )


def _fitting_tokens(spec: CacheSpec, shape: CacheShape, room: int) -> int | None:
    """The tokens of the longest sequence whose cache fits, with nothing to spare."""
    page = stored_bytes(spec, shape, 1, 0)
    if not page:
        return None
    pages = max(0, room) // page + pages_of_window(spec)
    return bisect.bisect_right(
        range(1, pages * spec.page + 1),
        room,
        key=lambda tokens: pool_bytes(spec, shape, tokens, 1, spare=False),
    )


def sequence_bytes(spec: CacheSpec, shape: CacheShape, context: int) -> int:
    """Everything stored for one sequence of ``context`` tokens, between two bursts."""
    local = min(pages_for(context, spec), pages_of_local(spec, shape.window))
    return stored_bytes(spec, shape, pages_for(context, spec), spec.exact_pages, local)


def bits_per_element(spec: CacheSpec, shape: CacheShape, context: int) -> float:
    """Stored bits over the numbers they stand for: codes, scales, indices and windows."""
    return 8 * sequence_bytes(spec, shape, context) / (context * shape.elements_per_token)
