import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.cache import CacheShape, empty_cache, page_bytes, pages_for, place
from jkvq.spec import PRESETS, parse_spec

SHAPE = CacheShape(layers=3, kv_heads=2, head_dim=16)


@pytest.mark.parametrize("name", PRESETS)
def test_page_bytes_are_those_of_the_allocated_arrays(name):
    spec = parse_spec(name)
    cache = empty_cache(spec, SHAPE, 7, jnp.zeros((2, 3), jnp.int32))
    stored = sum(array.nbytes for array in (cache.keys, cache.values))
    assert stored == 7 * page_bytes(spec, SHAPE)
    tokens = 7 * spec.page
    assert 8 * stored / (tokens * SHAPE.elements_per_token) == spec.bits_per_element


def test_pages_for_rounds_up():
    spec = parse_spec("bf16,page=8")
    assert [pages_for(tokens, spec) for tokens in (1, 7, 8, 9, 16)] == [1, 1, 1, 2, 2]


def test_place_puts_padding_on_the_padding_page():
    cache = empty_cache(parse_spec("f32,page=8"), SHAPE, 9, jnp.array([[5, 2], [7, 3]]))
    cache = dataclasses.replace(cache, length=jnp.array([6, 0]))
    at = place(cache, jnp.array([4, 1]), 5)
    np.testing.assert_array_equal(at.position, [[6, 7, 8, 9, 10], [0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(at.page, [[5, 5, 2, 2, 0], [7, 0, 0, 0, 0]])
    np.testing.assert_array_equal(at.slot, [[6, 7, 0, 1, 2], [0, 1, 2, 3, 4]])
