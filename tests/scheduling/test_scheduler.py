import pytest

from jkvq.cache.specs.spec_text import parse_spec
from jkvq.scheduling.scheduler import Limits, Scheduler
from jkvq.scheduling.sequence import Sequence

PLENTY = 10_000


def _scheduler(slots: int) -> Scheduler:
    limits = Limits(slots, PLENTY, PLENTY, 64, (32, 128), rows=8, tick_tokens=4096)
    return Scheduler(parse_spec("int4"), limits, prefix_cache=False)


def _submit(scheduler: Scheduler, numbers: range) -> None:
    for number in numbers:
        scheduler.submit(Sequence(number, list(range(20)), 100, scored=False))


def _end_oldest(scheduler: Scheduler, count: int) -> None:
    for sequence in scheduler.running[:count]:
        scheduler.end(sequence)


def test_who_comes_to_a_full_engine_begins_with_others():
    scheduler = _scheduler(128)
    _submit(scheduler, range(200))
    assert sum(map(len, scheduler.plan(8).groups)) == 128
    for ended in (3, 3):  # of 128 slots 3, then 6 are empty
        _end_oldest(scheduler, ended)
        assert not scheduler.reads
        assert scheduler.plan(8).groups == []
    _end_oldest(scheduler, 2)
    assert scheduler.reads
    (group,) = scheduler.plan(8).groups
    assert [chunk.sequence.number for chunk in group] == list(range(128, 136))


@pytest.mark.parametrize(
    ("slots", "requests", "ended"),
    [(128, 130, 2), (16, 40, 1)],
    ids=["all have a slot", "there are few slots"],
)
def test_nobody_waits_for_company_where(slots, requests, ended):
    scheduler = _scheduler(slots)
    _submit(scheduler, range(requests))
    scheduler.plan(8)
    _end_oldest(scheduler, ended)
    (group,) = scheduler.plan(8).groups
    assert [chunk.sequence.number for chunk in group] == list(range(slots, slots + ended))


def _taken(lengths: list[int], **limits) -> list[list[int]]:
    """Tokens of each prompt that the programs of the first tick take."""
    sizes = {"rows": 8, "tick_tokens": 1024, "row_step": 8, **limits}
    scheduler = Scheduler(
        parse_spec("int4"), Limits(64, PLENTY, PLENTY, 64, (32, 128, 256), **sizes)
    )
    for number, length in enumerate(lengths):
        scheduler.submit(Sequence(number, list(range(length)), 100, scored=False))
    groups = scheduler.plan(8).groups
    return [[chunk.end - chunk.start for chunk in group] for group in groups]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([20, 100, 30, 90], [[100, 90, 20, 30]]),
        ([20, 100, 30], [[100], [20, 30]]),
        ([20] * 10, [[20] * 8, [20] * 2]),
        ([200] * 9, [[200] * 4]),
        ([20, 200, 200, 200, 200, 30], [[200, 200, 200, 20]]),
        ([1000], [[256], [256], [256], [232]]),
    ],
    ids=[
        "rows that a program has anyway take narrower prompts",
        "a program of one row has none to spare",
        "a program has so many rows at most",
        "a tick has so many tokens at most",
        "nobody overtakes the oldest that do not fit",
        "a long prompt has several chunks",
    ],
)
def test_prompts_of_a_tick(lengths, expected):
    assert _taken(lengths) == expected


def test_a_chunk_that_is_longer_than_a_tick_runs_alone():
    assert _taken([200, 200], tick_tokens=128) == [[200]]


def test_stored_prompts_stay_while_letting_go_of_them_would_not_be_enough():
    limits = Limits(2, 1 + 8, PLENTY, 16, (32,), rows=2, tick_tokens=4096)
    scheduler = Scheduler(parse_spec("int4,page=32"), limits)
    stored, runs, waits = (
        Sequence(number, [number] * tokens, 64, scored=False)
        for number, tokens in enumerate((65, 97, 129))
    )
    scheduler.submit(stored)
    scheduler.plan(1)
    scheduler.end(stored)
    assert (scheduler.packed.used, scheduler.packed.idle) == (2, 2)
    scheduler.submit(runs)
    scheduler.plan(1)
    scheduler.submit(waits)
    assert scheduler.plan(1).groups == []  # of 8 pages 4 run and 2 are stored; it wants 5
    assert scheduler.packed.idle == 2 and scheduler.prefix.evicted == 0
    scheduler.end(runs)
    ((chunk,), *_) = scheduler.plan(1).groups
    assert chunk.sequence is waits
    assert scheduler.prefix.evicted == 2  # the oldest, as 5 of 8 pages were stored
    assert scheduler.packed.free == 0
