import itertools

import numpy as np
import pytest

import jkvq
from jkvq.bench.serving.traffic import Load, Prompts, Scenario, parse_scenarios

LOAD = Load(Scenario(100, 8), "closed", 2, 0.0, 6)


def test_scenarios_are_read():
    assert parse_scenarios("D(256,1024), D(8, 1)") == [Scenario(256, 1024), Scenario(8, 1)]


@pytest.mark.parametrize("text", ["", "256,32", "D(256)", "D(0,4)", "D(1,2)D(3,4)", "D(1,2);"])
def test_what_is_no_scenario_is_refused(text):
    with pytest.raises(jkvq.UserError, match=r"such as D\(256,1024\)"):
        parse_scenarios(text)


def test_prompts_have_their_length_and_begin_unlike_each_other():
    prompts = list(itertools.islice(Prompts(4.5, "x").of(LOAD, 0), 50))
    prompts += itertools.islice(Prompts(4.5, "x").of(LOAD, 1), 50)
    assert {len(each) for each in prompts} == {450}
    assert len({each[:12] for each in prompts}) == 100
    (apart,) = itertools.islice(Prompts(4.5, "y").of(LOAD, 0), 1)
    assert apart[:4] not in {each[:4] for each in prompts}  # another time, none of these
    long = Load(Scenario(200_000, 1), "closed", 1, 0.0, 1)
    assert len(next(Prompts(4.5, "x").of(long, 0))) == 900_000  # longer than the text that there is


def test_prompts_share_what_they_are_to_and_only_within_a_run():
    load = Load(Scenario(100, 8), "closed", 2, 0.75, 6)
    one, two = itertools.islice(Prompts(4.0, "x").of(load, 3), 2)
    (other,) = itertools.islice(Prompts(4.0, "x").of(load, 4), 1)
    assert (len(one), one[:300]) == (400, two[:300])
    assert one[300:310] != two[300:310] and one[:10] != other[:10]
    assert Prompts(4.0, "x").shared(load, 3) == one[:300]


def test_an_open_loop_is_a_poisson_process():
    load = Load(Scenario(1, 1), "open", 5.0, 0.0, 20_000)
    gaps = np.diff([0.0, *load.arrivals()])
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.03)  # of an exponential one: its mean
    assert (gaps > 0.4).mean() == pytest.approx(np.exp(-2), rel=0.06)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("closed", 0, 0.0, 1), "concurrency=0: clients at once"),
        (("open", 0.0, 0.0, 1), "rate=0.0: requests a second"),
        (("closed", 1, 1.0, 1), "prefix=1.0: the share of a prompt, 0 to 0.99"),
        (("closed", 1, 0.0, 0), "requests=0: a whole number, 1 or more"),
    ],
)
def test_loads_that_cannot_be_are_refused(change, sentence):
    with pytest.raises(jkvq.UserError, match=f"^{sentence}"):
        Load(Scenario(1, 1), *change)
