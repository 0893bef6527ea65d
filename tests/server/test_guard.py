"""Texts are looked at again when nobody waits, and nobody is the worse for it."""

import logging
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import jkvq
from jkvq.cache.layout import empty_cache
from jkvq.cache.shape import CacheShape
from jkvq.engine.forward import forward
from jkvq.llm import with_cache
from jkvq.models.decoder import logits
from jkvq.server.guard import Guard, Guarded, Text, guarded, require_packed
from jkvq.server.metrics import GuardMetrics
from jkvq.support.compile_clock import compiling
from tests.made_up import random_calibration
from tests.server.conftest import running
from tests.tiny import CONFIG, tiny_model

PROMPT = [(11 * i * i + i) % 256 for i in range(50)]
ANSWER = [(7 * i * i + 3 * i) % 256 for i in range(40)]


class Noted(GuardMetrics):
    """What a guard finds."""

    def __init__(self):
        self.found: list[tuple[float, int | None]] = []
        self.out = self.warnings = 0

    def replayed(self, kl, diverged):
        self.found.append((kl, diverged))

    def left_out(self):
        self.out += 1

    def warned(self):
        self.warnings += 1


@pytest.fixture(scope="module")
def model() -> jkvq.Model:
    return tiny_model()


@pytest.fixture(scope="module")
def int2(model) -> jkvq.LLM:
    return with_cache(model, "int2,page=8")


@pytest.fixture(scope="module")
def how(model) -> Guarded:
    """With a cache that is as bad as the one that is served, and one that is not."""
    others = {name: with_cache(model, name) for name in ("int2,page=16", "int8,page=8")}
    return Guarded(with_cache(model, "f32,page=8"), others, 1.0, 1e-3)


def log_probabilities(llm: jkvq.LLM, tokens: list[int]) -> np.ndarray:
    """Of the token after each, from one pass over all of them, in float64."""
    table = jnp.arange(1, 33, dtype=jnp.int32)[None]
    cache = empty_cache(llm.spec, CacheShape.of(CONFIG), 33, table)
    given = jnp.asarray([[*tokens, *[0] * (256 - len(tokens))]]), jnp.array([len(tokens)])
    hidden, _ = forward(llm.config, llm.params, llm.basis, cache, *given, phase="forced")
    scores = np.asarray(logits(llm.config, llm.params, hidden), np.float64)[0, : len(tokens)]
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def work_all(guard: Guard) -> int:
    slices = 0
    while guard.waits:
        guard.work()
        slices += 1
    return slices


def test_it_finds_the_kl_and_the_first_token_that_would_be_another(int2, how):
    guard = Guard(int2, how, noted := Noted())
    guard.take(PROMPT, ANSWER)
    guard.take(PROMPT[::-1], ANSWER[:5])
    guard.take(PROMPT, ANSWER)  # in the same pages, after others
    assert work_all(guard) > 3 * 2
    for (kl, diverged), (prompt, answer) in zip(
        noted.found, [(PROMPT, ANSWER), (PROMPT[::-1], ANSWER[:5]), (PROMPT, ANSWER)], strict=True
    ):
        inputs = [*prompt, *answer][:-1]
        exact, few = (
            log_probabilities(llm, inputs)[len(prompt) - 1 :] for llm in (how.plain, int2)
        )
        assert len(exact) == len(answer)
        expected = (np.exp(exact) * (exact - few)).sum(-1).mean()
        assert kl == pytest.approx(expected, rel=1e-3) and expected > 0.01
        others = exact.argmax(-1) != few.argmax(-1)
        assert diverged == (int(others.argmax()) if others.any() else None)
    assert noted.found[0] == noted.found[2]
    assert {diverged is None for _, diverged in noted.found} >= {False}


def test_it_warns_with_the_cache_that_holds(int2, how, caplog):
    guard = Guard(int2, how, noted := Noted())
    guard.warm_up()
    before = compiling()
    for turn in range(8):
        guard.take(PROMPT[turn:], ANSWER[:6])
        work_all(guard)
    assert compiling() == before  # which would keep somebody waiting
    assert noted.warnings == 1
    (line,) = caplog.messages
    mean = np.mean([kl for kl, _ in noted.found])
    assert line.startswith(f"the cache does not hold: KL {mean:.2g} in the last 8 texts")
    assert "above 0.001; int8,page=8 has " in line
    guard.take(PROMPT, ANSWER[:6])
    work_all(guard)
    assert noted.warnings == 1  # not for every text


def test_a_cache_that_holds_is_not_warned_of(model, how, caplog):
    guard = Guard(with_cache(model, "int8,page=8"), how, noted := Noted())
    for turn in range(9):
        guard.take(PROMPT[turn:], ANSWER[:6])
    work_all(guard)
    assert len(noted.found) == 9 and noted.warnings == 0 and not caplog.messages


def test_what_waits_is_bounded_and_a_share_is_a_share(int2, how):
    guard = Guard(int2, how, noted := Noted())
    for _ in range(20):
        guard.take(PROMPT, ANSWER)
    assert (len(guard._texts), noted.out) == (16, 4)
    guard._texts.clear()
    guard.take([0] * 5000, ANSWER)  # nothing of the answer would be read
    guard.take(PROMPT, [])
    assert not guard.waits and noted.out == 5
    guard.take(PROMPT, ANSWER * 100)
    assert guard._texts == type(guard._texts)([Text((*PROMPT, *ANSWER * 100)[:1024], 50)])
    few = Guard(int2, Guarded(how.plain, {}, 0.1, 1.0), noted := Noted())
    few._random.seed(0)
    for _ in range(1000):
        few.take(PROMPT, ANSWER)
    assert 60 < len(few._texts) + noted.out < 140


def test_a_server_looks_at_texts_when_nobody_waits_and_writes_the_same(model, int2, how, caplog):
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0.8, "seed": 3}
    with running(int2) as served:
        alone = served.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert "jkvq_guard" not in served.http.get("/metrics").text
    with running(int2, guarded=how) as served:
        driver, busy = served.server.driver, []
        guard = driver._guard
        assert guard is not None
        work = guard.work
        guard.work = lambda: (busy.append(len(driver._going)), work())[1]
        for _ in range(3):
            answer = served.http.post("/v1/completions", json=body).json()
            assert answer["choices"][0]["text"] == alone
        served.wait_until("jkvq_guard_texts_total", 3)
        assert served.figure("jkvq_guard_kl_sum") > 0
        assert served.figure("jkvq_guard_kl_count") == 3
        assert busy and set(busy) == {0}  # nobody was being served
        assert served.http.post("/v1/completions", json=body).status_code == 200
    assert not [line for line in caplog.records if line.levelno >= logging.ERROR]


def test_a_guard_that_fails_is_let_go_and_texts_go_on(int2, how, caplog):
    with running(int2, guarded=how) as served:
        guard, failed = served.server.driver._guard, threading.Event()
        assert guard is not None

        def fail():
            failed.set()
            raise RuntimeError("no memory")

        guard.work = fail
        body = {"prompt": PROMPT, "max_tokens": 4}
        assert served.http.post("/v1/completions", json=body).status_code == 200
        assert failed.wait(20)
        assert served.http.post("/v1/completions", json=body).status_code == 200
        end = time.monotonic() + 20
        while "the guard has failed" not in caplog.text and time.monotonic() < end:
            time.sleep(0.01)
    assert "the guard has failed, and does no more" in caplog.text


def test_others_are_those_that_the_model_can_have_the_smallest_first(model, int2):
    found = guarded(model, int2, share=0.5, limit=0.1)
    assert (found.share, found.limit) == (0.5, 0.1)
    names = list(found.others)
    assert (names[0], names[-1]) == ("saw-int4", "int8")
    assert all(llm.params is model.params for llm in (found.plain, *found.others.values()))
    assert "int8" not in guarded(model, with_cache(model, "int8"), share=1, limit=1).others


def test_calibrated_caches_are_among_the_others_and_hold_no_weights_twice(model, int2):
    calibration = random_calibration(CacheShape.of(CONFIG))
    how = {"share": 1.0, "limit": 1.0, "calibration": calibration}
    alone = guarded(model, int2, **how).others
    assert {"jkvq-int3", "jkvq-int4"} < set(alone)
    assert alone["jkvq-int3"].params is alone["jkvq-int4"].params is not model.params
    assert alone["saw-int4"].params is model.params
    few = with_cache(model, "jkvq-int2", calibration)
    beside = guarded(model, few, **how).others
    assert beside["jkvq-int3"].params is beside["jkvq-int4"].params is few.params
    other = with_cache(model, "jkvq-int2", random_calibration(CacheShape.of(CONFIG), centroids=8))
    assert guarded(model, other, **how).others["jkvq-int3"].params is not other.params


@pytest.mark.parametrize("cache", ["bf16", "f32,page=8"])
def test_a_cache_of_16_bits_has_nothing_to_guard(cache):
    with pytest.raises(jkvq.UserError, match=rf"^guard looks at .* and {cache} has 16 or more"):
        require_packed(jkvq.parse_spec(cache))
