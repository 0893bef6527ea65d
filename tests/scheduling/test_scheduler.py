from jkvq.cache.specs.spec_text import parse_spec
from jkvq.scheduling.scheduler import Limits, Scheduler
from jkvq.scheduling.sequence import Sequence

PLENTY = 10_000


def _scheduler(slots: int, rows: int = 8) -> Scheduler:
    limits = Limits(slots, PLENTY, PLENTY, 64, (32, 128), rows, tick_tokens=4096)
    return Scheduler(parse_spec("int4"), limits, prefix_cache=False)


def _submit(scheduler: Scheduler, numbers: range) -> None:
    for number in numbers:
        scheduler.submit(Sequence(number, list(range(20)), 100, scored=False))


def _end_oldest(scheduler: Scheduler, count: int) -> None:
    for sequence in scheduler.running[:count]:
        scheduler.end(sequence)


def test_who_comes_to_a_full_engine_begins_with_others():
    scheduler = _scheduler(slots=128)
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


def test_nobody_waits_for_company_where_all_have_a_slot():
    scheduler = _scheduler(slots=128)
    _submit(scheduler, range(130))
    scheduler.plan(8)
    _end_oldest(scheduler, 2)
    (group,) = scheduler.plan(8).groups
    assert len(group) == 2


def test_of_few_slots_none_stays_empty():
    scheduler = _scheduler(slots=16)
    _submit(scheduler, range(40))
    scheduler.plan(8)
    _end_oldest(scheduler, 1)
    (group,) = scheduler.plan(8).groups
    assert [chunk.sequence.number for chunk in group] == [16]
