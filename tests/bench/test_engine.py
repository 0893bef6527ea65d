import dataclasses

import numpy as np
import pytest

import jkvq
from jkvq.bench.engine import (
    Request,
    Workload,
    bench_engine,
    draw_requests,
    engine_figure,
)
from tests.tiny import tiny_llm, tiny_model

WORKLOAD = Workload(requests=5, prompt_tokens=(3, 20), new_tokens=(1, 9), seed=1)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return draw_requests(tiny_model(), WORKLOAD)


@pytest.fixture(scope="module")
def found(requests):
    return bench_engine({"bf16": tiny_llm("bf16")}, requests, [2])


def test_requests_are_as_asked_and_those_of_a_seed_are_the_same(requests):
    assert len(requests) == 5
    assert all(3 <= len(each.prompt) <= 20 and 1 <= each.new_tokens <= 9 for each in requests)
    assert len({each.new_tokens for each in requests}) > 1
    assert draw_requests(tiny_model(), WORKLOAD) == requests
    assert draw_requests(tiny_model(), dataclasses.replace(WORKLOAD, seed=2)) != requests
    fixed = dataclasses.replace(WORKLOAD, prompt_tokens=(7, 7), shared_prefix=10)
    drawn = draw_requests(tiny_model(), fixed)
    assert {len(each.prompt) for each in drawn} == {17}
    assert len({tuple(each.prompt[:10]) for each in drawn}) == 1
    assert len({tuple(each.prompt) for each in drawn}) == 5


def test_every_way_writes_what_was_asked(found, requests):
    ways = [(each.way, each.concurrency) for each in found]
    calls, batches, engine = "one call after the other", "static batches", "engine"
    assert ways == [(calls, 1), (batches, 2), (engine, 2)]
    assert {each.tokens for each in found} == {sum(each.new_tokens for each in requests)}
    assert {each.prefilled_tokens for each in found} == {sum(len(r.prompt) for r in requests)}


def test_figures_agree_with_each_other(found):
    calls, batches, engine = found
    for each in found:
        assert each.tokens_per_second == pytest.approx(each.tokens / each.seconds)
        rate = each.tokens_per_second / calls.tokens_per_second
        assert each.over_calls == pytest.approx(rate)
        assert 0 < each.first_token.median <= each.first_token.p95 <= each.seconds
        assert 0 <= each.between_tokens.median <= each.between_tokens.p95
        assert each.pool_bytes > 0
    assert calls.over_batches is None
    assert batches.over_batches == 1
    rate = engine.tokens_per_second / batches.tokens_per_second
    assert engine.over_batches == pytest.approx(rate)


def test_a_shared_beginning_is_read_from_the_cache():
    load = Workload(3, prompt_tokens=(4, 4), new_tokens=(2, 2), shared_prefix=256)
    drawn = draw_requests(tiny_model(), load)
    calls, engine = bench_engine({"bf16": tiny_llm("bf16")}, drawn, [1])
    assert engine.over_batches == engine.over_calls  # batches of one are single calls
    assert (calls.cached_tokens, calls.prefilled_tokens) == (0, 3 * 260)
    assert (engine.cached_tokens, engine.prefilled_tokens) == (2 * 256, 260 + 2 * 4)


def test_a_context_that_is_too_short_is_refused():
    load = dataclasses.replace(WORKLOAD, shared_prefix=1000)
    with pytest.raises(jkvq.UserError, match=r"prompts of up to 1020 tokens .* context of 1024"):
        draw_requests(tiny_model(), load)


def test_the_picture_has_throughput_by_concurrency(found):
    calls, batches, engine = found
    faster = dataclasses.replace(engine, concurrency=8, tokens_per_second=1e6)
    (axes,) = engine_figure([calls, batches, engine, faster], "a title").axes
    assert axes.get_xlabel() and axes.get_ylabel() == "tokens per second"
    rates = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in axes.lines}
    assert rates == {
        "bf16: engine": [engine.tokens_per_second, 1e6],
        "bf16: static batches": [batches.tokens_per_second],
        "bf16: one call after the other": [calls.tokens_per_second] * 2,
    }
