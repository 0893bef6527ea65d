import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.cache.footprint import bits_per_element
from jkvq.cache.layout import (
    PACK_EVERY,
    empty_cache,
    layer_groups,
    page_of,
    pages_for,
    pages_in_turn,
    pages_of_window,
    place_of,
    stored_bytes,
)
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.presets import PRESETS
from jkvq.cache.specs.spec_text import parse_spec

SHAPE = CacheShape(layers=3, kv_heads=2, head_dim=128)


@pytest.mark.parametrize("name", [*PRESETS, "jkvq-int2,exact_layers=1", "int4,group=32"])
def test_stored_bytes_are_those_of_the_allocated_arrays(name):
    spec = parse_spec(name)
    cache = empty_cache(spec, SHAPE, 7, jnp.zeros((2, 3), jnp.int32))
    allocated = sum(array.nbytes for array in jax.tree.leaves(cache.groups))
    assert allocated == stored_bytes(spec, SHAPE, 7, 1 + 2 * pages_of_window(spec))


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("bf16", 16),
        ("int8", 8.25),
        ("int4", 4.25),
        ("int3", 3.25),
        ("int2", 2.25),
        ("int4,group=32", 5),
        ("int4,group=64", 4.5),
        ("int4,key.bits=3,value.bits=2", 2.75),
        ("tq-k3v3", 3.125),
        ("tq-k3v2", 2.625),
        ("blockgtq-k2v2", (2.5 + 2.125) / 2),
        ("kmeans256-int4", 4.25 + 8 / 256),  # an index for two heads of 128
        ("kmeans2048-int4", 4.25 + 16 / 256),
        ("int4,exact_layers=0", (2 * 4.25 + 16) / 3),
        ("int4,bits=2@0-1,value.bits=8@2", (2 * 2.25 + (4.25 + 8.25) / 2) / 3),
    ],
)
def test_bits_per_element_of_whole_pages(name, bits):
    assert bits_per_element(parse_spec(name), SHAPE, 64 * 100) == pytest.approx(bits)


@pytest.mark.parametrize(
    ("name", "most"),
    [("oscar-int2", 2.31), ("jkvq-int2", 2.31), ("saw-int4", 4.25), ("tq-k3v3", 3.13)],
)
def test_bits_per_element_at_128k(name, most):
    spec, context = parse_spec(name), 128 * 1024
    shape = CacheShape(1, 1, 128)
    pages = pages_for(context, spec)
    cache = empty_cache(spec, shape, pages, jnp.zeros((1, 1), jnp.int32))
    allocated = sum(array.nbytes for array in jax.tree.leaves(cache.groups))
    assert 8 * allocated / (context * shape.elements_per_token) <= most


def test_pages_for_rounds_up():
    spec = parse_spec("bf16,page=8")
    assert [pages_for(tokens, spec) for tokens in (1, 7, 8, 9, 16)] == [1, 1, 1, 2, 2]
    windowed = parse_spec("int2,page=8,sink=4,recent=10")  # pages only for what leaves the windows
    assert [pages_for(tokens, windowed) for tokens in (1, 31, 32, 39, 40)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    "name", ["int2,page=8,sink=4,recent=10", "jkvq-int4", "oscar-int2,page=16,window_bits=8"]
)
def test_16_bit_pages_that_are_in_use_at_once_are_different_ones(name):
    spec = parse_spec(name)
    table = pages_in_turn(spec, 2, 100)
    assert table.min() == 1 and table.max() == 2 * pages_of_window(spec)
    for length in range(60 * spec.page):
        first = (spec.sink + spec.packed(length)) // spec.page
        last = (length + PACK_EVERY - 1) // spec.page
        columns = [*range(spec.sink_pages), *range(first, last + 1)]
        assert len(np.unique(table[:, columns])) == 2 * len(columns)


def test_page_of_puts_padding_on_the_padding_page():
    position = np.array([[6, 7, 8, 9, 10], [0, 1, 2, 3, 4]])
    real = np.array([[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]], bool)
    page, slot = page_of(jnp.array([[5, 2], [7, 3]]), jnp.asarray(position), real, 8)
    np.testing.assert_array_equal(page, [[5, 5, 2, 2, 0], [7, 0, 0, 0, 0]])
    np.testing.assert_array_equal(slot, [[6, 7, 0, 1, 2], [0, 1, 2, 3, 4]])


def test_page_of_puts_what_lies_off_the_table_on_the_padding_page():
    table, real = jnp.array([[5, 2]]), np.ones((1, 4), bool)
    page, _ = page_of(table, jnp.array([[-1, 15, 16, 4000]]), real, 8)
    np.testing.assert_array_equal(page, [[0, 2, 0, 0]])


def test_exact_layers_have_a_group_of_their_own():
    spec = parse_spec("int4,exact_layers=1+3")
    places = [tuple(place_of(spec, 5, layer)) for layer in range(5)]
    assert places == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    everything = parse_spec("int4,exact_layers=0+1")
    assert [tuple(place_of(everything, 2, layer)) for layer in range(2)] == [(0, 0), (0, 1)]


def test_layers_that_are_coded_alike_share_a_group():
    spec = parse_spec("int4,bits=2@0+3,value.bits=8@1,exact_layers=4")
    groups = layer_groups(spec, 6)
    assert [group.layers for group in groups] == [(2, 5), (0, 3), (1,), (4,)]
    widths = [(group.spec.key.bits, group.spec.value.bits) for group in groups]
    assert widths == [(4, 4), (2, 2), (4, 8), (16, 16)]
    assert [place_of(spec, 6, layer) for layer in (5, 3, 1, 4)] == [(0, 1), (1, 1), (2, 0), (3, 0)]
    # Layers with a window, in groups of their own
    local = layer_groups(spec, 6, (None, 8, None, 8, None, None))
    assert [group.layers for group in local] == [(2, 5), (0,), (4,), (3,), (1,)]
