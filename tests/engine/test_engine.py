"""The engine over a small real model: whatever happens to a request, its text is its own."""

import dataclasses
import gc
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkvq
from jkvq.cache.calibrated import methods_for
from jkvq.cache.shape import CacheShape
from jkvq.engine import capacity
from jkvq.engine.engine import Engine
from jkvq.models.decoder import logits
from tests.made_up import random_calibration
from tests.tiny import CONFIG, model_of, tiny_llm, tiny_model

# Heads of 16 channels; windows of two pages, so that prompts of a few chunks leave them.
CACHES = ["bf16,page=8", "int4,page=8", "jkvq-int4,page=8,sink=8,recent=16"]
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 256, n).tolist() for n in (3, 20, 33, 64, 65, 97)]
GREEDY = {"max_new_tokens": 20, "ignore_eos": True}


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(capacity, "_CHUNKS", {"cpu": (8, 32)})
    monkeypatch.setattr(capacity, "_TICK_TOKENS", {"cpu": 64})


def _llm(cache: str) -> jkvq.LLM:
    spec = jkvq.parse_spec(cache)
    calibration = random_calibration(CacheShape.of(CONFIG)) if methods_for(spec) else None
    return jkvq.with_cache(tiny_model(), cache, calibration)


def _engine(llm: jkvq.LLM, **changes: Any) -> Engine:
    """One whose programs have the same shapes whoever is in them."""
    sizes: dict[str, Any] = {"slots": 4, "prefill_rows": 1, "pages": 200}
    return Engine(llm, **(sizes | changes))


def test_an_engine_that_has_ended_everything_is_let_go():
    engine = _engine(_llm("f32,page=8"))
    engine._ahead = 1  # as on a GPU: a burst is launched before it is known that a text has ended
    tokens = engine.submit("Hello", max_new_tokens=9).result().tokens
    engine.submit("Hello", max_new_tokens=99, stop_tokens=tokens[-1:]).result()
    dropped = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert dropped() is None
    finally:
        gc.enable()


def test_no_step_is_launched_that_nobody_has_a_token_for(monkeypatch):
    engine, steps = _engine(_llm("f32,page=8")), []
    burst = engine._runner.burst
    monkeypatch.setattr(
        engine._runner, "burst", lambda *args: steps.append(args[3]) or burst(*args)
    )
    engine._short, engine._long = 1, 4
    assert len(engine.submit("Hello", max_new_tokens=8, ignore_eos=True).result().tokens) == 8
    assert steps == [1, 4, 2]  # short as long as a prompt is read; its tick draws a token too


@pytest.mark.parametrize(
    "cache", [*(pytest.param(cache, marks=pytest.mark.slow) for cache in CACHES[:-1]), CACHES[-1]]
)
def test_a_text_does_not_depend_on_what_happens_to_it(cache):
    llm = _llm(cache)
    alone = []
    for prompt in PROMPTS:
        alone.append(_engine(llm).submit(prompt, **GREEDY).result())
    # In company, all at once and more than there are slots
    engine = _engine(llm)
    handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS]
    for handle, expected in zip(handles, alone, strict=True):
        assert handle.result().tokens == expected.tokens
        assert handle.result().logprobs == expected.logprobs
        assert handle.result().cached_tokens == 0
    # Again, with prompts that are stored
    handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS]
    for handle, expected in zip(handles, alone, strict=True):
        result = handle.result()
        assert (result.tokens, result.logprobs) == (expected.tokens, expected.logprobs)
    assert any(handle.result().cached_tokens for handle in handles)
    # With a pool that is too small for all as they grow, so that some begin again
    short = [prompt[:20] for prompt in PROMPTS[1:5]]
    longer = {"max_new_tokens": 40, "ignore_eos": True}
    alone = [_engine(llm).submit(prompt, **longer).result() for prompt in short]
    engine = _engine(llm, pages=12)
    handles = [engine.submit(prompt, **longer) for prompt in short]
    for handle, expected in zip(handles, alone, strict=True):
        assert handle.result().tokens == expected.tokens
    assert engine.stats.preemptions > 0
    assert engine.stats.running == engine.stats.waiting == 0


@pytest.mark.parametrize("cache", CACHES[1:])
@pytest.mark.parametrize("length", [32, 33, 63, 64, 65, 72, 97])
def test_a_hit_gives_the_logits_of_a_miss(cache, length, monkeypatch):
    """Prompts that end at, before and after borders of pages (8) and chunks (32)."""
    llm, found = _llm(cache), []

    def logits_of(engine: Engine, prompt) -> np.ndarray:
        join = engine._runner.join
        monkeypatch.setattr(
            engine._runner,
            "join",
            lambda hidden, starts: found.append(hidden) or join(hidden, starts),
        )
        engine.submit(prompt, max_new_tokens=1).result()
        return np.asarray(logits(llm.config, llm.params, found[-1]))

    prompt = RNG.integers(0, 256, length).tolist()
    warm, cold = _engine(llm), _engine(llm, prefix_cache=False)
    warm.submit([*prompt[:-1], 255 - prompt[-1], 7], max_new_tokens=30).result()
    hit, miss = logits_of(warm, prompt), logits_of(cold, prompt)
    np.testing.assert_allclose(hit, miss, atol=1e-5)
    assert warm.stats.cached_tokens == (length - 1) // 32 * 32
    assert cold.stats.cached_tokens == 0


def test_requests_may_come_and_go_while_others_run(tiny):
    engine = _engine(tiny)
    first = engine.submit(PROMPTS[3], max_new_tokens=60, ignore_eos=True)
    for _ in range(3):
        engine.step()
    second = engine.submit(PROMPTS[1], **GREEDY)
    third = engine.submit(PROMPTS[2], **GREEDY)
    pieces = list(second)
    assert "".join(pieces) == second.result().text and len(pieces) > 3
    third.cancel()
    assert third.done and third.result().finish_reason == "cancelled"
    assert len(first.result().tokens) == 60
    for handle, prompt in ((first, PROMPTS[3]), (second, PROMPTS[1])):
        options = {"max_new_tokens": len(handle.result().tokens), "ignore_eos": True}
        assert handle.result().tokens == _engine(tiny).submit(prompt, **options).result().tokens


def test_cancelled_requests_give_their_pages_back(tiny):
    engine = _engine(tiny, prefix_cache=False)
    handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS]
    engine.step()
    assert engine.stats.pages[0] > 0 and engine.stats.waiting == 2
    for handle in handles:
        handle.cancel()
    assert engine.stats.pages[0] == engine.stats.running == engine.stats.waiting == 0
    assert engine.step() == []


def test_an_error_of_one_request_is_its_own(tiny):
    # Token 65 has an embedding that is not a number; nothing else reads it.
    embedding = tiny.params["embedding"].at[65].set(jnp.nan)
    head = {"weight": jnp.where(jnp.isnan(embedding), 0.0, embedding)}
    llm = dataclasses.replace(tiny, params={**tiny.params, "embedding": embedding, "head": head})
    engine = _engine(llm)
    bad, good = (engine.submit([3, token, 7], **GREEDY) for token in (65, 5))
    assert bad.result().finish_reason == "error"
    assert "token 1 of request 0 are not numbers (NaN)" in (bad.result().error or "")
    assert good.result().tokens == _engine(llm).submit([3, 5, 7], **GREEDY).result().tokens


def test_a_text_that_cannot_be_written_is_its_own_error(tiny, monkeypatch):
    engine = _engine(tiny)
    bad, good = (engine.submit([3, token, 7], **GREEDY) for token in (9, 5))
    monkeypatch.setattr(bad.writer._stream, "add", lambda token: 1 / 0)
    assert "cannot be written: division by zero" in (bad.result().error or "")
    assert len(good.result().tokens) == 20
    assert engine.stats.running == 0


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"slots": 0}, "slots=0: sequences that run at once, 1 to 4096"),
        ({"memory": 2.0}, "memory=2.0: the part of the free memory to take, 0.01 to 1"),
        ({"pages": -3}, "pages=-3: pages of 8 tokens, 1 or more"),
        ({"prefill_rows": 0}, "prefill_rows=0: prompts per prefill step, 1 to 64"),
        ({"prefix_cache": "no"}, "prefix_cache"),
    ],
)
def test_bad_sizes_are_refused(tiny, sizes, sentence):
    with pytest.raises(jkvq.UserError, match=sentence):
        Engine(tiny, **sizes)


def test_what_can_never_run_is_refused_at_once(tiny):
    engine = _engine(tiny, pages=8)
    with pytest.raises(jkvq.UserError, match=r"60 tokens of prompt and 12 .*never fit .* holds 64"):
        engine.submit([1] * 60, max_new_tokens=12)
    with pytest.raises(jkvq.UserError, match="submit takes one prompt, not 2"):
        engine.submit(["a", "b"])  # pyright: ignore
    with pytest.raises(jkvq.UserError, match="no option 'temprature'"):
        engine.submit("a", temprature=1.0)
    with pytest.raises(jkvq.UserError, match=r"cannot generate: give what jkvq\.load returns"):
        Engine(model_of(tiny))  # pyright: ignore
    assert engine.stats.waiting == 0
    assert len(engine.submit([1] * 52, max_new_tokens=13, ignore_eos=True).result().tokens) == 13


def test_an_answer_gets_the_room_that_there_is():
    engine = _engine(_llm("f32,page=8"), pages=8)
    assert engine.budget(60, 4) == 4
    room = engine.budget(60)  # as many as the pool has room for
    assert len(engine.submit([1] * 60, max_new_tokens=room, ignore_eos=True).result().tokens) == 5
    with pytest.raises(jkvq.UserError, match="never fit"):
        engine.budget(60, room + 1)
    with pytest.raises(jkvq.UserError, match="65 tokens of prompt and 1 of answer never fit"):
        engine.budget(65)
    roomy = _engine(_llm("f32,page=8"))
    assert roomy.budget(1000) == roomy.budget(1000, 99) == CONFIG.context - 1000


def test_memory_bounds_the_pools(tiny, monkeypatch):
    monkeypatch.setattr("jkvq.engine.capacity.free_bytes", lambda: 400_000)
    engine = Engine(tiny, memory=0.5, slots=4)
    assert 0.4 * 400_000 < engine.stats.pool_bytes <= 0.5 * 400_000
    windows = tiny_llm("int4,page=8,sink=64,recent=256")
    with pytest.raises(jkvq.UserError, match=r"windows of 64 sequences alone need .*fewer slots"):
        Engine(windows, memory=0.5, slots=64)


@pytest.mark.parametrize(
    ("raised", "expected", "sentence"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory", jkvq.UserError, r"4 sequences needs .*no room"),
        ("INTERNAL: a launch failed", jax.errors.JaxRuntimeError, "a launch failed"),
    ],
)
def test_pools_that_the_device_has_no_room_for_are_refused(
    tiny, monkeypatch, raised, expected, sentence
):
    def empty_groups(*_):
        raise jax.errors.JaxRuntimeError(raised)

    monkeypatch.setattr("jkvq.engine.runner.empty_groups", empty_groups)
    with pytest.raises(expected, match=sentence):
        Engine(tiny, slots=4)


def test_several_threads_may_wait_for_one_engine(tiny):
    engine, found = _engine(tiny), {}
    handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:4]]

    def wait(index: int):
        found[index] = handles[index].result().tokens

    threads = [threading.Thread(target=wait, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = _engine(tiny)
    assert found == {
        index: alone.submit(prompt, **GREEDY).result().tokens
        for index, prompt in enumerate(PROMPTS[:4])
    }


def test_joins_and_leaves_compile_nothing(tiny):
    from jkvq.support.compile_clock import compiling

    engine = _engine(tiny)
    for prompt in PROMPTS:
        engine.submit(prompt, **GREEDY).result()
    before = compiling()
    handles = [engine.submit(prompt[1:], **GREEDY) for prompt in PROMPTS]
    handles[2].cancel()
    for handle in handles:
        handle.result()
    assert compiling() == before
