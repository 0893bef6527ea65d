"""The decode kernel for Hopper: that it compiles for one, and on one against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.pallas_kernels.mosaic.decode import alike, decode
from jkvq.pallas_kernels.mosaic.program import make_teams, reads, tile_tokens
from jkvq.pallas_kernels.triton.decode import merge_partials
from jkvq.pallas_kernels.types import Heads, Shift
from jkvq.pallas_kernels.work import DecodePlan, Span, share_work, tiles_in_order, units_of
from tests.pallas_kernels.reference.test_paged_attention import LAYER, Stored
from tests.pallas_kernels.triton.test_decode import SCALE, assert_close

# cache, KV heads, query heads of each, channels, tokens of a page
SHAPES = [
    ("int4", 8, 4, 128, 64),
    ("int2", 8, 4, 128, 64),
    ("int3", 8, 4, 128, 64),
    ("int8", 4, 2, 128, 64),
    ("jkvq-int2,sink=0,recent=0", 8, 4, 128, 64),
    ("int4,value.bits=2", 2, 6, 128, 32),
    ("int4", 1, 16, 128, 128),
    ("int4", 1, 1, 64, 16),
    ("int2", 3, 3, 64, 64),
    ("int4", 4, 8, 256, 256),
    ("jkvq-int2,sink=0,recent=0", 1, 4, 256, 64),
    ("int4", 4, 1, 256, 64),
    ("int2", 1, 16, 256, 64),
    ("bf16", 8, 4, 128, 64),
    ("bf16", 2, 6, 64, 16),
    ("tq-k3v3", 8, 4, 128, 64),
    ("tq-k3v2", 2, 6, 64, 16),
    ("tq-k4v4", 4, 8, 256, 64),
    ("blockgtq-k3v3", 8, 4, 128, 64),
    ("blockgtq-k2v2", 2, 1, 64, 64),
]


# cache, pages of the windows, KV heads, query heads of each, channels, tokens of a page
WITH_WINDOWS = [
    ("int4", "bf16", 8, 4, 128, 64),
    ("int2", "bf16", 2, 6, 64, 16),  # windows in fewer warpgroups
    ("int2", "bf16", 4, 8, 256, 64),
    ("int2", "int8", 8, 4, 128, 64),
    ("jkvq-int2,sink=0,recent=0", "int8", 2, 6, 128, 64),
]


def _span(stored: Stored, q, table, length, shares: int, shift=None, first=None) -> Span:
    keys, values = stored.sides
    heads = Heads(keys.kv_heads, q.shape[1] // keys.kv_heads, q.shape[2])
    tile = tile_tokens(stored.codecs, heads, keys.page)
    units, skipped = units_of(length, first, tile)
    cut = share_work(units, shares)
    tiles = tiles_in_order(cut, table, keys.page // tile, skipped)
    plan = DecodePlan(length, cut, tiles, first=first)
    return Span(keys, values, stored.codecs, table, plan, shift)


def _partials(stored: Stored, q, table, length, shares: int, shift=None, first=None):
    span = _span(stored, q, table, length, shares, shift, first)
    return decode(q, [span], LAYER, scale=SCALE)[0]


@pytest.mark.parametrize(("cache", "heads", "group", "channels", "page"), SHAPES)
def test_the_kernel_is_made_for_a_gpu_anywhere(cache, heads, group, channels, page):
    stored = Stored(cache, [page + 1], heads, channels, page_size=page)
    assert reads(stored.codecs, Heads(heads, group, channels), page)
    q = jnp.zeros((1, heads * group, channels), jnp.bfloat16)
    shift = Shift(jnp.zeros(q.shape), jnp.zeros((3, channels), jnp.float16), first=1)
    if cache in ("bf16", "int8"):  # as windows have it
        shift = Shift(shift.queries, shift.turns, jnp.zeros((1, 2 * page), jnp.int32))

    def run(q, table, length, shift, first):
        return _partials(stored, q, table, length, 7, shift, first).out

    first = jnp.asarray([3]) if cache in ("int4", "bf16") else None  # as layers with a window have
    traced = jax.jit(run).trace(q, stored.table, jnp.asarray([page + 1]), shift, first)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(("channels", "expected"), [(128, True), (256, False)])
def test_formats_share_a_launch_if_blocks_suit_both(channels, expected):
    both = [Stored(x, [65], 4, channels, page_size=64) for x in ("int4", "bf16")]
    q = jnp.zeros((1, 16, channels), jnp.bfloat16)
    spans = [_span(stored, q, stored.table, jnp.asarray([65]), 7) for stored in both]
    assert alike(q, spans) == expected and alike(q, spans[:1])


@pytest.mark.parametrize(("cache", "window", "heads", "group", "channels", "page"), WITH_WINDOWS)
def test_pages_of_two_formats_are_one_kernel(cache, window, heads, group, channels, page):
    both = [Stored(x, [page + 1], heads, channels, page_size=page) for x in (cache, window)]
    q = jnp.zeros((1, heads * group, channels), jnp.float32)
    shift = Shift(jnp.zeros(q.shape), jnp.zeros((3, channels), jnp.float16), first=1)

    def run(q, length, shift):
        spans = [_span(stored, q, stored.table, length, 7, shift) for stored in both]
        return [part.out for part in decode(q, spans, LAYER, scale=SCALE)]

    traced = jax.jit(run).trace(q, jnp.asarray([page + 1]), shift)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("heads", "group", "page", "expected"),
    [
        (8, 4, 64, (4, 1, 64)),  # KV heads of a team, warps of each, tokens of a tile
        (8, 8, 64, (2, 2, 64)),
        (1, 16, 128, (1, 4, 64)),
        (2, 6, 32, (2, 2, 32)),
        (6, 1, 16, (2, 1, 16)),
        (3, 3, 64, (1, 1, 64)),
    ],
)
def test_teams_have_all_heads_and_fit_in_shared_memory(heads, group, page, expected):
    for token_bytes in (72, 136, 264):
        teams = make_teams(Heads(heads, group, 128), page, token_bytes)
        if token_bytes == 136:
            assert (teams.heads, teams.warps, teams.tile) == expected
        assert heads % teams.heads == 0 and teams.warps * 4 >= group
        assert teams.count * teams.size % 4 == 0  # whole warpgroups
        assert 2 * teams.count * teams.heads * teams.tile * token_bytes < 227 * 1024


@pytest.mark.parametrize(
    ("cache", "channels", "page"),
    [
        ("f32", 128, 64),
        ("int4,group=32", 128, 64),
        ("kmeans16-int4", 128, 64),
        ("int3", 64, 64),  # 8 bytes of high bits
        ("blockgtq-k3v3", 128, 32),  # a thread has no eight tokens
        ("blockgtq-k3v3", 256, 64),  # a page is two tiles
    ],
)
def test_codecs_that_the_kernel_cannot_read_are_left_to_others(cache, channels, page):
    stored = Stored(cache, [1], 4, channels, page_size=page)
    assert not reads(stored.codecs, Heads(4, 4, channels), page)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("cache", "heads", "group", "channels", "page"), SHAPES)
def test_attention_over_pages(cache, heads, group, channels, page, dtype):
    lengths = [1, page - 1, page, page + 1, 3 * page, 0, 5 * page - 2]
    stored = Stored(cache, lengths, heads, channels, page_size=page)
    q = jax.random.normal(jax.random.key(3), (len(lengths), heads * group, channels), dtype)

    @functools.partial(jax.jit, static_argnums=3)
    def run(q, table, length, shares):
        return merge_partials([_partials(stored, q, table, length, shares)], q.shape[1])

    for shares in (1, 5, 40):
        out, lse = run(q, stored.table, jnp.asarray(lengths), shares)
        assert_close(stored, q, lengths, out, lse)
        np.testing.assert_array_equal(out, run(q, stored.table, jnp.asarray(lengths), shares)[0])


@pytest.mark.gpu
@pytest.mark.parametrize(("cache", "heads", "group", "channels", "page"), SHAPES)
def test_tokens_that_a_window_has_left_are_not_seen(cache, heads, group, channels, page):
    lengths, firsts = [1, 3 * page, 5 * page - 2, 4 * page, 0], [0, 5, 2 * page + 3, 3 * page, 0]
    stored = Stored(cache, lengths, heads, channels, page_size=page)
    shape = len(lengths), heads * group, channels
    q = jax.random.normal(jax.random.key(3), shape, jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=4)
    def run(q, table, length, first, shares):
        part = _partials(stored, q, table, length, shares, first=first)
        return merge_partials([part], q.shape[1])

    for shares in (1, 5, 40):
        out, lse = run(q, stored.table, jnp.asarray(lengths), jnp.asarray(firsts), shares)
        assert_close(stored, q, lengths, out, lse, firsts)


@pytest.mark.gpu
@pytest.mark.parametrize(("cache", "window", "heads", "group", "channels", "page"), WITH_WINDOWS)
def test_attention_over_pages_of_two_formats(cache, window, heads, group, channels, page):
    long = [1, page - 1, page, page + 1, 3 * page, 0, 40 * page - 2]
    short = [0, 2, page, page + 3, 2 * page, 5, 2 * page - 1]
    lengths = long, short
    both = [
        Stored(x, own, heads, channels, page_size=page)
        for x, own in zip((cache, window), lengths, strict=True)
    ]
    q = jax.random.normal(jax.random.key(3), (len(long), heads * group, channels), jnp.float32)

    @functools.partial(jax.jit, static_argnums=2)
    def run(q, lengths, shares):
        spans = [
            _span(stored, q, stored.table, length, cut)
            for stored, length, cut in zip(both, lengths, shares, strict=True)
        ]
        parts = decode(q, spans, LAYER, scale=SCALE)
        return [merge_partials([part], q.shape[1]) for part in parts]

    for shares in ((1, 5), (40, 3), (200, 200)):
        found = run(q, [jnp.asarray(own) for own in lengths], shares)
        for stored, own, (out, lse) in zip(both, lengths, found, strict=True):
            assert_close(stored, q, own, out, lse)
