import dataclasses

import jax
import pytest

import jkvq
from jkvq.cache.footprint import footprint
from jkvq.cache.layout import empty_groups, pages_for, pages_of_window, stored_bytes
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.engine.capacity import call_limits
from jkvq.models.config import LocalLayers
from tests.tiny import CONFIG, SERVED

WEIGHTS = 123_456


@pytest.mark.parametrize("name", SERVED)
def test_footprint_is_what_is_allocated(tiny, name):
    spec = parse_spec(name)
    size = footprint(CONFIG, spec, weights=WEIGHTS, context=300, batch=3, memory=None)
    llm = dataclasses.replace(tiny, spec=spec)
    limits = call_limits(llm, [300] * 3)  # what a call allocates
    pools = empty_groups(spec, CacheShape.of(CONFIG), limits.pages, limits.exact_pages)
    assert size.cache == sum(leaf.nbytes for leaf in jax.tree.leaves(pools))
    assert size.total == WEIGHTS + size.cache
    elements = 300 * 2 * CONFIG.layers * CONFIG.kv_heads * CONFIG.head_dim
    assert size.bits_per_element == 8 * size.per_sequence / elements


@pytest.mark.parametrize("name", ["bf16", "jkvq-int4,rotation=none,digits=none,center=false"])
def test_footprint_counts_the_sequences_that_fit(name):
    spec, shape = parse_spec(name), CacheShape.of(CONFIG)

    def size(memory: int | None):
        return footprint(CONFIG, spec, weights=WEIGHTS, context=300, batch=1, memory=memory)

    assert size(None).fits is None
    # Five sequences with the windows of eight, and the pages that take padding
    pages, windows = 1 + 5 * pages_for(300, spec), 1 + 8 * pages_of_window(spec)
    least = WEIGHTS + stored_bytes(spec, shape, pages, windows)
    for memory, fits in [(least, 5), (least - 1, 4), (WEIGHTS, 0)]:
        assert size(memory).fits == fits


@pytest.mark.parametrize(
    "name",
    [
        "bf16",
        "int4,sink=5,recent=9,page=8",
        "int4,recent=9,page=8,window_bits=8",
        "int4,exact_layers=1",
    ],
)
def test_footprint_counts_the_tokens_that_fit(name):
    """One more token would not fit, and the longest sequence is what a pool of its size holds."""
    spec, shape = parse_spec(name), CacheShape.of(CONFIG)
    for memory in (WEIGHTS - 1, WEIGHTS, WEIGHTS + 100_000, WEIGHTS + 3_000_000):
        size = footprint(CONFIG, spec, weights=WEIGHTS, context=300, batch=1, memory=memory)
        assert size.fits_tokens is not None

        def taken(tokens: int) -> int:
            pages, windows = 1 + pages_for(tokens, spec), 1 + pages_of_window(spec)
            return WEIGHTS + stored_bytes(spec, shape, pages, windows)

        assert size.fits_tokens == 0 or taken(size.fits_tokens) <= memory
        assert taken(size.fits_tokens + 1) > memory


def test_windows_in_all_layers_hold_any_number_of_tokens():
    local = LocalLayers(tuple(range(CONFIG.layers)), 32, CONFIG.rope_theta, CONFIG.rope_divisors)
    config = dataclasses.replace(CONFIG, local=local)
    found = footprint(config, parse_spec("int4"), weights=0, context=300, batch=1, memory=10**8)
    assert found.fits is not None and found.fits > 0 and found.fits_tokens is None


@pytest.mark.parametrize(("context", "batch"), [(0, 1), (1025, 1), (10, 0)])
def test_footprint_of_what_cannot_be_is_refused(context, batch):
    spec = parse_spec("bf16")
    with pytest.raises(jkvq.UserError, match=r"context=|batch=0"):
        footprint(CONFIG, spec, weights=WEIGHTS, context=context, batch=batch, memory=None)
