"""The engine and its scheduler under anything that may happen, on a device made of dictionaries."""

import dataclasses
import functools
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jkvq.cache.layout import pages_of_local, pages_of_window
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.engine import engine as engine_module
from jkvq.engine.engine import Engine
from jkvq.engine.options import Options
from jkvq.engine.writer import Handle
from jkvq.models.config import LocalLayers
from jkvq.scheduling.scheduler import Limits, Scheduler
from jkvq.scheduling.sequence import Sequence
from jkvq.support.errors import UserError
from tests.engine.fake_runner import FakeRunner, expected_text
from tests.tiny import CONFIG, EOS, tiny_llm

CACHES = [
    "int4,page=8",
    "int4,page=32",  # longer than a chunk
    "int4,page=8,sink=8,recent=8",
    "int4,page=8,recent=16",
    "int4,page=8,sink=8,recent=8,exact_layers=0",
]
PREFIXES = [list(np.random.default_rng(n).integers(0, EOS, 70).tolist()) for n in range(2)]


@functools.cache
def _llm(cache: str, window: int | None):
    own = CONFIG.rope_theta, CONFIG.rope_divisors
    local = None if window is None else LocalLayers((1,), window, *own)
    return tiny_llm(cache, config=dataclasses.replace(CONFIG, local=local))


def fake_engine(
    cache: str,
    *,
    slots: int,
    pages: int,
    tails: int,
    ahead: int,
    keeps: bool = True,
    window: int | None = None,
):
    """An engine over a fake device."""
    llm = _llm(cache, window)
    windows = slots * pages_of_window(llm.spec) + tails
    local = slots * pages_of_local(llm.spec, window) + tails
    sizes = {"rows": 3, "tick_tokens": 24, "local_pages": 1 + local}
    limits = Limits(slots, 1 + pages, 1 + windows, 16, (4, 8, 16), **sizes)
    with pytest.MonkeyPatch.context() as patch:
        fake = functools.partial(FakeRunner, window=window)
        patch.setattr(engine_module, "Runner", lambda llm, limits: fake(llm.spec, limits))
        engine = Engine.__new__(Engine)
        engine._set_up(llm, limits, keeps)
    engine._ahead = ahead  # 1 as on a GPU
    engine._short, engine._long = 2, 4
    return engine


class Requests(RuleBasedStateMachine):
    """Requests that come, are watched, are cancelled, and share the pages of a small pool."""

    @initialize(
        cache=st.sampled_from(CACHES),
        slots=st.integers(1, 4),
        pages=st.integers(16, 28),
        tails=st.integers(0, 3),
        ahead=st.integers(0, 1),
        keeps=st.booleans(),
        window=st.sampled_from([None, 5, 8, 20]),
    )
    def start(self, cache, slots, pages, tails, ahead, keeps, window):
        sizes = {"slots": slots, "pages": pages, "tails": tails, "ahead": ahead, "keeps": keeps}
        self.engine = fake_engine(cache, **sizes, window=window)
        self.handles: list[tuple[Handle, list[int], int]] = []

    @rule(
        prefix=st.integers(0, 1),
        shared=st.integers(0, 70),
        own=st.lists(st.integers(0, EOS - 1), min_size=1, max_size=12),
        budget=st.integers(1, 45),
        scored=st.booleans(),
    )
    def submit(self, prefix, shared, own, budget, scored):
        prompt = PREFIXES[prefix][:shared] + own
        options = Options(max_new_tokens=budget, seed=0, prompt_logprobs=scored)
        self.handles.append((self.engine.submit_tokens(prompt, options), prompt, budget))

    @rule()
    def tick(self):
        if hasattr(self, "engine"):
            self.engine.step()

    @rule(which=st.integers(0, 100))
    def cancel(self, which):
        if self.handles:
            self.handles[which % len(self.handles)][0].cancel()

    @rule(which=st.integers(0, 100))
    def watch(self, which):
        if self.handles:
            self.handles[which % len(self.handles)][0].watched = True

    @invariant()
    def pages_have_the_owners_that_hold_them(self):
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine._scheduler
        entries = list(scheduler.prefix._entries.values())
        held = {scheduler.packed: [each.packed for each in scheduler.running]}
        kept = {scheduler.packed: [[*entry.packed.values()] for entry in entries]}
        for index, window in enumerate(scheduler._windows):
            own = [each.held[index].pages for each in scheduler.running]
            held[window.pool] = [[*pages.values()] for pages in own]
            tails = [entry.tail[index] for entry in entries if entry.tail]
            kept[window.pool] = [[*pages.values()] for pages in tails]
        for pool, own in held.items():
            owners = Counter(page for pages in (*own, *kept[pool]) for page in pages)
            assert {page: pool.owners(page) for page in range(pool.pages)} == {
                page: owners[page] for page in range(pool.pages)
            }
            assert pool.free + len(owners) == pool.pages - 1
        idle = Counter(page for pages in kept[scheduler.packed] for page in pages)
        assert set(idle.values()) <= {1}
        assert scheduler.packed.idle == sum(scheduler.packed.owners(page) == 1 for page in idle)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for handle, prompt, budget in self.handles:
            result = handle.result()
            text = expected_text(prompt, budget)
            if result.finish_reason == "cancelled":
                assert result.tokens == text[: len(result.tokens)]
            else:
                assert result.tokens == text
        self.pages_have_the_owners_that_hold_them()
        scheduler = self.engine._scheduler
        assert not scheduler.running and not scheduler.waiting
        scheduler.prefix.clear()
        assert scheduler.packed.used == scheduler.exact.used == scheduler.local.used == 0
        assert (scheduler.tables == 0).all()


Requests.TestCase.settings = settings(max_examples=50, stateful_step_count=100)
TestRequests = Requests.TestCase


def test_a_page_that_a_chunk_leaves_half_filled_is_not_shared():
    engine = fake_engine("int4,page=32", slots=4, pages=28, tails=0, ahead=0)
    prompts = [PREFIXES[0][:16] + [number] * 9 for number in range(4)]
    options = Options(max_new_tokens=20, seed=0)
    handles = [engine.submit_tokens(prompt, options) for prompt in prompts]
    assert [each.result().tokens for each in handles] == [expected_text(p, 20) for p in prompts]


def test_a_prompt_that_is_stored_once_more_leaves_no_second_copy():
    """A scored prompt stores again what is there: for both copies the pool would be too small."""
    engine = fake_engine("int4,page=8", slots=2, pages=16, tails=0, ahead=0)
    prompt = PREFIXES[0][:64]
    engine.submit_tokens(prompt[:48], Options(max_new_tokens=1, seed=0)).result()
    scored = Options(max_new_tokens=60, seed=0, prompt_logprobs=True, ignore_eos=True)
    handle = engine.submit_tokens(prompt, scored)
    for _ in range(100):
        engine.step()
    assert handle.done and engine.stats.preemptions == 0


def test_copies_of_a_prompt_that_runs_do_not_keep_each_other():
    """Two scored prompts that begin alike store it twice; the pool is too small for both."""
    engine = fake_engine("int4,page=8", slots=2, pages=16, tails=1, ahead=1, window=5)
    one, other = [57, 87, 216], [52, 7, 126, 185, 37, 200, 114, 255]
    for shared, own, budget in ((50, one, 45), (43, other, 20)):
        scored = Options(max_new_tokens=budget, seed=0, prompt_logprobs=True)
        engine.submit_tokens(PREFIXES[0][:shared] + own, scored)
    for _ in range(100):
        engine.step()
    assert not engine._handles and engine.stats.preemptions <= 5


@pytest.mark.parametrize("lengths", [(60, 17, 60), (17, 60, 60)])
def test_codes_that_others_have_yet_to_write_are_not_read_from_a_second_copy(lengths):
    """Behind windows and with exact layers, pages of a chunk are filled by who goes on from it."""
    cache = "int4,page=8,sink=8,recent=8,exact_layers=0"
    engine = fake_engine(cache, slots=1, pages=40, tails=6, ahead=0)
    for length, scored in zip(lengths, (False, True, False), strict=True):
        prompt = PREFIXES[0][:length]
        options = Options(max_new_tokens=1, seed=0, prompt_logprobs=scored)
        result = engine.submit_tokens(prompt, options).result()
        assert result.tokens == expected_text(prompt, 1)


def test_stored_prompts_are_no_more_than_pages():
    engine = fake_engine("int4,page=8,sink=8,recent=16", slots=1, pages=16, tails=2, ahead=0)
    one = Options(max_new_tokens=1, seed=0)
    for number in range(100):  # each in windows whole: it has no packed page
        engine.submit_tokens([number, *PREFIXES[0][:20]], one).result()
    prefix = engine._scheduler.prefix
    assert 2 <= len(prefix) <= 17 + engine._scheduler.exact.pages
    once_more = engine.submit_tokens([99, *PREFIXES[0][:20]], one).result()
    assert once_more.cached_tokens == 16


@pytest.mark.parametrize("ahead", [0, 1])
def test_pieces_add_up_to_the_text_if_others_run_the_engine_meanwhile(ahead):
    engine = fake_engine("int4,page=8", slots=2, pages=16, tails=0, ahead=ahead)
    options = Options(max_new_tokens=20, seed=0, ignore_eos=True)
    one, other = (engine.submit_tokens(PREFIXES[0][: 20 + n], options) for n in range(2))
    pieces = [(piece, other.result())[0] for piece in one]
    assert "".join(pieces) == one.result().text != ""
    assert not one.watched


def test_an_interrupted_tick_ends_the_engine(monkeypatch):
    engine = fake_engine("int4,page=8", slots=2, pages=16, tails=0, ahead=0)
    handle = engine.submit_tokens(PREFIXES[0], Options(max_new_tokens=5, seed=0))

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine._runner, "prefill", interrupted)
        handle.result()
    handle.cancel()
    for ask in (engine.step, lambda: engine.submit_tokens([1], Options(seed=0))):
        with pytest.raises(UserError, match="interrupted in the middle of a tick: make a new one"):
            ask()


@pytest.mark.parametrize("window", [1, 8, 20, 100, 128, 512])
@pytest.mark.parametrize("recent", [0, 8, 64, 192, 576])
@pytest.mark.parametrize("page", [8, 64, 128])
def test_a_sequence_never_has_more_pages_of_local_layers_than_there_are_for_it(
    window, recent, page
):
    """Counted as it grows by chunks and bursts, with pages to the end of the last one."""
    cache = f"int4,page={page},sink={recent and 8},recent={recent}"
    pages = Limits(1, 1000, 1000, 1000, (16, 64), rows=1, tick_tokens=64, local_pages=1000)
    scheduler = Scheduler(parse_spec(cache), pages, window=window, prefix_cache=False)
    scheduler.submit(Sequence(0, list(range(1500)), 700, scored=False))
    most = 0
    while scheduler.waiting or scheduler.running:
        plan = scheduler.plan(8)
        most = max(most, scheduler.local.used)
        for sequence, before in plan.decoding:
            scheduler.advance(sequence, sequence.launched - before)
            if sequence.launched == sequence.budget:
                scheduler.end(sequence)
    assert most <= pages_of_local(parse_spec(cache), window)


@pytest.mark.parametrize("cache", [cache for cache in CACHES if "page=8" in cache])
def test_what_bf16_would_take_counts_every_page_of_tokens_once(cache):
    engine = fake_engine(cache, slots=2, pages=28, tails=0, ahead=0, keeps=False)
    page = 8 * 2 * 2 * (2 * 2 * 16)  # tokens, keys and values, bytes, and layers of 2 heads of 16
    handle = engine.submit_tokens(
        list(range(40)), Options(max_new_tokens=40, seed=0, ignore_eos=True)
    )
    seen = set()
    while not handle.done:
        engine.step()
        if handle.sequence.state == "decode":
            assert engine.stats.bf16_bytes == -(-handle.sequence.granted // 8) * page
            seen.add(engine.stats.bf16_bytes)
    assert len(seen) > 1
    assert engine.stats.bf16_bytes == engine.stats.used_bytes == 0
