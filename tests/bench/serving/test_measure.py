import asyncio

import numpy as np
import pytest

import jkvq
from jkvq.bench.serving.client import Timed
from jkvq.bench.serving.figure import serving_figure
from jkvq.bench.serving.measure import Measured, bench_server, summary
from jkvq.bench.serving.traffic import Load, Scenario
from tests.bench.serving.conftest import Scripted, scripted

SHORT = Scenario(50, 5)
FIRST, BETWEEN = 0.2, 0.02
SLACK = 0.1  # seconds that a busy machine may add to one of the two


def measured(url: str, *loads: Load) -> list[Measured]:
    async def run() -> list[Measured]:
        rows = bench_server("it", loads, url=url, model=None, key=None, advance=lambda _: None)
        return [row async for row in rows]

    return asyncio.run(run())


def closed(clients: int, requests: int, scenario: Scenario = SHORT) -> Load:
    return Load(scenario, "closed", clients, 0.0, requests)


def test_figures_are_those_of_the_paper():
    done = [
        Timed(0.0, 0.5, 2.5, tokens=4, prompt_tokens=10, cached_tokens=5),  # 2 s for 4, 3 between
        Timed(1.0, 2.0, 3.0, tokens=11, prompt_tokens=30, cached_tokens=0),  # 1 s for 11
        Timed(1.0, 4.0, 4.0, tokens=1, prompt_tokens=20, cached_tokens=25),  # none after the first
        Timed(0.5, error="no"),
    ]
    found = summary("it", closed(2, 4, Scenario(20, 11)), done)
    assert (found.failed, found.error, found.tokens) == (1, "no", 16)
    assert (found.seconds, found.system_rate) == (4.0, 4.0)  # (4 + 11 + 1) / 4
    assert found.request_rate == pytest.approx((4 / 2 + 11 / 1) / 2)
    assert found.ttft.mean == pytest.approx((0.5 + 1 + 3) / 3) and found.ttft.p50 == 1.0
    assert found.ttft.p90 == pytest.approx(1 + 0.8 * 2) and found.ttft.p99 == pytest.approx(2.96)
    assert found.tpot is not None and found.tpot.mean == pytest.approx((2 / 3 + 1 / 10) / 2)
    assert found.e2e.mean == pytest.approx((2.5 + 2 + 3) / 3)
    assert (found.prompt_tokens, found.cached_share) == (20, 0.5)
    assert not found.whole_answers


def test_times_are_those_that_the_server_takes():
    with scripted(server := Scripted(FIRST, BETWEEN)) as url:
        (found,) = measured(url, closed(3, 6))
    assert found.tpot is not None
    assert FIRST <= found.ttft.p50 < FIRST + SLACK
    assert BETWEEN <= found.tpot.p50 < BETWEEN + SLACK
    assert FIRST + 4 * BETWEEN <= found.e2e.p50 < FIRST + 4 * (BETWEEN + SLACK)
    assert found.seconds >= 2 * (FIRST + 4 * BETWEEN)  # two waves of three
    assert (found.tokens, found.whole_answers, found.cached_share) == (30, True, None)
    assert found.prompt_tokens == pytest.approx(50, abs=1)
    assert server.most_running == 3
    assert all(body["ignore_eos"] and body["model"] == "scripted" for body in server.bodies)


def test_an_open_loop_sends_when_requests_come_and_not_when_others_end():
    load = Load(Scenario(50, 2), "open", 100.0, 0.0, 12)
    with scripted(server := Scripted(0.3, 0.0)) as url:
        (found,) = measured(url, load)
    assert server.most_running == 12  # all came in about 0.12 s, of which none had ended
    assert 0.3 <= found.ttft.mean < 0.3 + SLACK
    assert found.seconds == pytest.approx(0.3 + load.arrivals()[-1] - load.arrivals()[0], abs=SLACK)


def test_where_texts_end_early_the_tokens_that_were_made_are_counted():
    with scripted(Scripted(0.0, 0.0, most=3, refused=("ignore_eos",))) as url:
        (found,) = measured(url, closed(1, 2))
    assert (found.tokens, found.whole_answers) == (6, False)


def test_requests_that_fail_are_counted_and_left_out():
    with scripted(Scripted(0.0, 0.0, fails=2)) as url:
        (found,) = measured(url, closed(1, 5))
    assert (found.failed, found.error) == (2, "502: bad gateway")
    assert found.tokens == 3 * 5


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"refused": ("stream_options",)}, "does not answer: 400: stream_options is not known"),
        ({"usage": False}, "counts no tokens when it streams"),
    ],
)
def test_a_server_that_cannot_be_measured_is_refused(options, sentence):
    with scripted(Scripted(0.0, 0.0, **options)) as url, pytest.raises(jkvq.UserError) as refusal:
        measured(url, closed(1, 1))
    assert sentence in str(refusal.value)


def test_nobody_there_is_refused():
    with pytest.raises(jkvq.UserError, match="/v1/models names no model"):
        measured("http://127.0.0.1:9", closed(1, 1))


def test_the_picture_has_a_row_for_each_scenario():
    done = [Timed(0.0, 0.5, 2.5, 4, 10, 0), Timed(0.0, 1.0, 4.0, 4, 10, 0)]
    found = [
        summary(server, Load(Scenario(tokens, 4), "closed", level, prefix, 2), done)
        for server in ("bf16", "int4")
        for tokens in (10, 20)
        for prefix in (0.0, 0.5)
        for level in (1, 2)
    ]
    figure = serving_figure(found, "a title")
    assert len(figure.axes) == 2 * 4
    first = figure.axes[0]
    assert first.get_ylabel() == "tokens per second of the system"
    assert [np.asarray(line.get_ydata()).tolist() for line in first.lines] == [[2.0, 2.0]] * 4
    assert len(serving_figure(found[:2], "a title").axes) == 3
