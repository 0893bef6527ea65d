import jax
import jax.numpy as jnp
import pytest

import jkvq
from jkvq.cache.footprint import footprint
from jkvq.cache.layout import empty_cache, pages_for
from jkvq.cache.spec_text import parse_spec
from tests.tiny import CONFIG, SERVED

WEIGHTS = 123_456


@pytest.mark.parametrize("name", SERVED)
def test_footprint_is_what_is_allocated(name):
    spec = parse_spec(name)
    size = footprint(CONFIG, spec, weights=WEIGHTS, context=300, batch=3, memory=None)
    pages = 3 * pages_for(300, spec) + 1
    cache = empty_cache(spec, CONFIG.cache_shape, pages, jnp.zeros((3, 2), jnp.int32))
    assert size.cache == sum(leaf.nbytes for leaf in jax.tree.leaves(cache.stacks))
    assert size.total == WEIGHTS + size.cache
    elements = 300 * 2 * CONFIG.layers * CONFIG.kv_heads * CONFIG.head_dim
    assert size.bits_per_element == 8 * size.per_sequence / elements


def test_footprint_counts_the_sequences_that_fit():
    spec = parse_spec("bf16")
    one = footprint(CONFIG, spec, weights=WEIGHTS, context=64, batch=1, memory=None)
    five = footprint(CONFIG, spec, weights=WEIGHTS, context=64, batch=5, memory=None)
    assert one.fits is None
    for memory, fits in [(five.total, 5), (five.total - 1, 4), (WEIGHTS, 0)]:
        size = footprint(CONFIG, spec, weights=WEIGHTS, context=64, batch=1, memory=memory)
        assert size.fits == fits


@pytest.mark.parametrize(("context", "batch"), [(0, 1), (1025, 1), (10, 0)])
def test_footprint_of_what_cannot_be_is_refused(context, batch):
    spec = parse_spec("bf16")
    with pytest.raises(jkvq.UserError, match=r"context=|batch=0"):
        footprint(CONFIG, spec, weights=WEIGHTS, context=context, batch=batch, memory=None)
