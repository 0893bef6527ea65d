"""Which backend decodes: the plan says so."""

import jax.numpy as jnp
import pytest

from jkvq.pallas_kernels.decode import plan_decode
from jkvq.pallas_kernels.types import Heads
from tests.pallas_kernels.reference.test_paged_attention import Stored


def _plan(cache: str, implementation):
    stored = Stored(cache, [100], 2, 128, page_size=64)
    heads, how = Heads(2, 4, 128), {"page": 64, "implementation": implementation}
    return plan_decode(jnp.asarray([100]), stored.table, stored.codecs, heads, **how)


@pytest.mark.parametrize(
    ("capability", "implementation", "cache", "by_mosaic"),
    [
        (9.0, "pallas", "int4", True),
        (9.0, "pallas", "jkvq-int2,sink=0,recent=0", True),
        (9.0, "pallas", "bf16", False),  # as fast, and Triton's is known better
        (9.0, "pallas", "tq-k3v3", True),
        (9.0, "pallas", "int4,group=32", False),  # not read by Mosaic
        (9.0, "mosaic", "bf16", True),
        (9.0, "mosaic", "blockgtq-k3v3", True),
        (9.0, "mosaic", "int4,group=32", False),
        (9.0, "triton", "int4", False),
        (9.0, "interpret", "int4", False),
        (8.0, "pallas", "int4", False),
        (8.9, "pallas", "int4", False),
        (10.0, "pallas", "int4", False),
    ],
)
def test_mosaic_decodes_on_hopper_what_it_reads(
    monkeypatch, capability, implementation, cache, by_mosaic
):
    monkeypatch.setattr("jkvq.pallas_kernels.settings.compute_capability", lambda: capability)
    plan = _plan(cache, implementation)
    assert (plan.tiles is not None) == by_mosaic
    assert (plan.settings is None) == by_mosaic
