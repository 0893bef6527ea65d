"""The decode kernel for Hopper: that it compiles for one, and on one against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.pallas_kernels.mosaic.decode import decode
from jkvq.pallas_kernels.mosaic.program import make_teams, reads
from jkvq.pallas_kernels.triton.decode import merge_partials
from jkvq.pallas_kernels.types import Heads, Shift
from jkvq.pallas_kernels.work import DecodePlan, pages_in_order, share_work
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
    ("bf16", 8, 4, 128, 64),
    ("bf16", 2, 6, 64, 16),
]


def _partials(stored: Stored, q, table, length, shares: int, shift=None):
    cut = share_work(-(-length // stored.sides[0].page), shares)
    plan = DecodePlan(length, cut, pages_in_order(cut, table))
    (keys, values), codecs = stored.sides, stored.codecs
    return decode(q, keys, values, *codecs, LAYER, plan, shift, scale=SCALE)


@pytest.mark.parametrize(("cache", "heads", "group", "channels", "page"), SHAPES)
def test_the_kernel_is_made_for_a_gpu_anywhere(cache, heads, group, channels, page):
    stored = Stored(cache, [page + 1], heads, channels, page_size=page)
    assert all(reads(codec, channels) for codec in stored.codecs)
    q = jnp.zeros((1, heads * group, channels), jnp.bfloat16)
    shift = Shift(jnp.zeros((1, heads * group, 3)), first=1)
    if cache == "bf16":  # as windows have it
        shift = Shift(shift.scores, jnp.zeros((1, 2 * page), jnp.int32))

    def run(q, table, length, shift):
        return _partials(stored, q, table, length, 7, shift).out

    traced = jax.jit(run).trace(q, stored.table, jnp.asarray([page + 1]), shift)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


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


def test_codecs_that_the_kernel_cannot_read_are_left_to_others():
    for cache in ("f32", "tq-k3v3", "int4,group=32", "kmeans16-int4"):
        stored = Stored(cache, [1], 2, 128, page_size=64)
        assert not reads(stored.codecs[0], 128), cache
    assert not reads(Stored("int3", [1], 2, 64, page_size=64).codecs[0], 64)  # 8 bytes of high bits


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
