"""What a model and its cache take of memory."""

from dataclasses import dataclass

from jkvq.cache.layout import pages_for, stored_bytes
from jkvq.cache.shape import CacheShape
from jkvq.cache.spec import CacheSpec
from jkvq.models.config import ModelConfig
from jkvq.support.errors import UserError


@dataclass(frozen=True)
class Footprint:
    """Bytes, unless a name says otherwise."""

    weights: int
    per_packed_token: float  # over all layers, keys and values
    window: int  # of each sequence, beside its pages
    per_sequence: int  # of the stated context, in whole pages
    bits_per_element: float  # of such a sequence: everything stored counts
    cache: int  # of the whole batch
    total: int
    fits: int | None  # sequences beside the weights in the stated memory


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
    shape = config.cache_shape
    spec.check(shape.layers, shape.head_dim, config.context)
    page, window = stored_bytes(spec, shape, 1, 0), stored_bytes(spec, shape, 0, 1)
    sequence = sequence_bytes(spec, shape, context)
    cache = batch * sequence + page  # one page takes the writes of padding
    room = None if memory is None else max(0, memory - weights - page)
    return Footprint(
        weights=weights,
        per_packed_token=page / spec.page,
        window=window,
        per_sequence=sequence,
        bits_per_element=bits_per_element(spec, shape, context),
        cache=cache,
        total=weights + cache,
        fits=None if room is None else room // sequence,
    )


def sequence_bytes(spec: CacheSpec, shape: CacheShape, context: int) -> int:
    """Everything stored for one sequence of ``context`` tokens."""
    return stored_bytes(spec, shape, pages_for(context, spec), 1)


def bits_per_element(spec: CacheSpec, shape: CacheShape, context: int) -> float:
    """Stored bits over the numbers they stand for: codes, scales, indices and windows."""
    return 8 * sequence_bytes(spec, shape, context) / (context * shape.elements_per_token)
