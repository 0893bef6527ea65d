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
