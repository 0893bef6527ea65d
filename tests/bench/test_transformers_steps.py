"""Steps of transformers: that they run, in a process of their own."""

import dataclasses

import pytest

from jkvq.bench.transformers_steps import bench_transformers
from jkvq.support.errors import UserError
from tests.tiny import CONFIG


@pytest.mark.slow  # two libraries are imported in another process
def test_every_batch_and_context_is_timed():
    pytest.importorskip("torch")
    found = bench_transformers(CONFIG, [1, 2], [16, 40])
    assert list(found) == [(1, 16), (2, 16), (1, 40), (2, 40)]
    assert all(ms is not None and ms > 0 for ms in found.values())


def test_other_families_are_refused():
    with pytest.raises(UserError, match="a shape of family llama: only shapes of qwen3"):
        bench_transformers(dataclasses.replace(CONFIG, family="llama"), [1], [16])
