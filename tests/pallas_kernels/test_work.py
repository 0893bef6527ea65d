import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jkvq.pallas_kernels.triton.decode import merge_partials
from jkvq.pallas_kernels.work import one_each, share_start, share_work, tiles_in_order


@functools.partial(jax.jit, static_argnums=1)
def _planned(units, shares: int):
    every = jnp.arange(shares + 1, dtype=jnp.int32)
    return share_work(units, shares), share_start(every, units.sum(dtype=jnp.int32), shares)


UNITS = st.integers(0, 9)
# Few numbers of sequences and of shares, as each pair is compiled
SEQUENCES = st.sampled_from([1, 2, 7]).flatmap(lambda n: st.lists(UNITS, min_size=n, max_size=n))


@given(SEQUENCES, st.sampled_from([1, 3, 12]))
def test_every_unit_is_done_once_and_every_partial_result_is_found(units, shares):
    plan, starts = jax.tree.map(np.asarray, _planned(np.array(units, np.int32), shares))
    before, total = plan.before, sum(units)
    done, written = np.zeros(total, int), {}
    sizes = []
    for j in range(shares):
        start, stop = starts[j : j + 2].tolist()
        sizes.append(stop - start)
        for b in range(plan.first[j], plan.last[j] + 1):
            mine = range(max(start, before[b]), min(stop, before[b + 1]))
            done[mine.start : max(mine.stop, mine.start)] += 1
            assert j + b not in written, "two programs write the same partial result"
            assert 0 <= j + b < shares + len(units) - 1
            written[j + b] = b
    np.testing.assert_array_equal(done, 1)
    busy = [size for size in sizes if size]
    assert not busy or max(busy) - min(busy) <= 1
    for b, count in enumerate(units):
        found = range(plan.partial[b], plan.partial[b] + plan.count[b])
        assert [written[r] for r in found] == [b] * len(found)
        assert sorted(r for r, owner in written.items() if owner == b and count) == list(found)


def test_shares_of_millions_of_pages_do_not_overflow():
    units = np.full(64, 40_000)
    plan = jax.tree.map(np.asarray, share_work(jnp.asarray(units, jnp.int32), 1056))
    edges = np.arange(1057) * units.sum() // 1056  # in 64 bits
    found = np.asarray(share_start(jnp.arange(1057), jnp.int32(units.sum()), 1056))
    assert np.abs(found - edges).max() <= 1 and found[-1] == units.sum()
    sizes = np.diff(found)
    assert sizes.max() - sizes.min() <= 1
    first = found[:-1] // 40_000  # the sequence of each share's first unit
    np.testing.assert_array_equal(plan.first, first)
    np.testing.assert_array_equal(plan.last, (found[1:] - 1) // 40_000)
    owner = np.searchsorted(found, np.arange(64) * 40_000, side="right") - 1
    np.testing.assert_array_equal(plan.partial, owner + np.arange(64))


def test_tiles_of_all_units_stand_in_order():
    table = np.array([[5, 2, 9], [4, 0, 0], [7, 1, 3]])
    units = [5, 0, 4]  # tiles of sequences; two of a page
    shares = share_work(jnp.asarray(units, jnp.int32), 4)
    found = np.asarray(tiles_in_order(shares, jnp.asarray(table), 2))
    assert len(found) == table.size * 2
    expected = [10, 11, 4, 5, 18, 14, 15, 2, 3]  # pages 5, 2 and half of 9; pages 7 and 1
    np.testing.assert_array_equal(found[:9], expected)


def test_partial_results_found_elsewhere_are_merged_like_others():
    """A sink is one: its lse is a logit, and it reads one value."""
    rng = np.random.default_rng(3)
    (out_a, out_b), (lse_a, lse_b) = rng.normal(size=(2, 3, 4, 16)), rng.normal(size=(2, 3, 4))
    parts = [
        one_each(jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32))
        for out, lse in ((out_a, lse_a), (out_b, lse_b))
    ]
    out, lse = merge_partials(parts, 4, interpret=True)
    a, b = (np.exp(x)[..., None] for x in (lse_a, lse_b))
    np.testing.assert_allclose(out, (a * out_a + b * out_b) / (a + b), atol=1e-5)
    np.testing.assert_allclose(lse, np.log(a + b)[..., 0], atol=1e-5)
