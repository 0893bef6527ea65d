"""What a model and its cache take of memory."""

from dataclasses import dataclass

from jkvq.cache import page_bytes, pages_for
from jkvq.errors import UserError
from jkvq.llm import weight_bytes
from jkvq.models.config import ModelConfig
from jkvq.spec import CacheSpec


@dataclass(frozen=True)
class Footprint:
    """Bytes, unless a name says otherwise."""

    weights: int
    per_token: float  # over all layers, keys and values
    bits_per_element: float
    per_sequence: int  # of the stated context, in whole pages
    cache: int  # of the whole batch
    total: int
    fits: int | None  # sequences beside the weights in the stated memory


def footprint(
    config: ModelConfig,
    spec: CacheSpec,
    *,
    dtype,
    context: int,
    batch: int,
    memory: int | None,
) -> Footprint:
    """The memory of ``batch`` sequences of ``context`` tokens, as it is allocated."""
    if not 1 <= context <= config.context:
        raise UserError(f"context={context}: this model takes 1 to {config.context} tokens")
    if batch < 1:
        raise UserError(f"batch={batch}: at least 1 is needed")
    page = page_bytes(spec, config.cache_shape)
    weights, sequence = weight_bytes(config, dtype), pages_for(context, spec) * page
    per_token = page / spec.page
    padding = page  # one page takes the writes of padding
    room = None if memory is None else max(0, memory - weights - padding)
    return Footprint(
        weights=weights,
        per_token=per_token,
        bits_per_element=8 * per_token / config.cache_shape.elements_per_token,
        per_sequence=sequence,
        cache=batch * sequence + padding,
        total=weights + batch * sequence + padding,
        fits=None if room is None else room // sequence,
    )
