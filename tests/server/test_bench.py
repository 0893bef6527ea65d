"""`jkvq bench serve` with our own server."""

import pytest

from jkvq.bench.serving.traffic import Load, Scenario
from tests.bench.serving.test_measure import closed, measured


def test_our_server_is_measured_and_says_what_it_had_stored(served):
    scenario = Scenario(400, 3)
    shared = Load(scenario, "closed", 2, 0.8, 4)
    apart, common = measured(served.address, closed(2, 4, scenario), shared)
    for each in (apart, common):
        assert (each.failed, each.tokens) == (0, 12)
        assert each.prompt_tokens == pytest.approx(400, rel=0.01)
        assert 0 < each.ttft.mean < each.e2e.mean < each.seconds
    assert apart.cached_share == 0
    assert common.cached_share == pytest.approx(256 / 400, rel=0.01)  # whole chunks
