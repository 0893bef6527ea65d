"""Penalties and biases through the engine: the counts are of each text, whoever runs beside it."""

from collections import Counter

import pytest

from jkvq.engine.engine import Engine
from tests.tiny import tiny_llm

PENALTIES = {"frequency_penalty": 0.4, "presence_penalty": 0.5, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_llm(), slots=3, pages=300, prefill_rows=1, prefix_cache=False)


def by_hand(engine: Engine, prompt: list[int], length: int) -> list[int]:
    """A text whose tokens are drawn one by one, each with the penalties of those before."""
    text: list[int] = []
    for _ in range(length):
        bias = {token: -0.4 * many - 0.5 for token, many in Counter(text).items()}
        drawn = engine.submit(prompt + text, max_new_tokens=1, logit_bias=bias, ignore_eos=True)
        text += drawn.result().tokens
    return text


def test_penalties_count_the_text_in_bursts_and_in_company(engine):
    prompt = [5, 6, 7, 5]
    expected = by_hand(engine, prompt, 14)
    plain = engine.submit(prompt, max_new_tokens=14, ignore_eos=True).result()
    assert expected != plain.tokens
    assert max(Counter(plain.tokens).values()) > max(Counter(expected).values())
    asked = [PENALTIES, {"ignore_eos": True}, PENALTIES, {"logit_bias": {9: 100}}, PENALTIES]
    handles = [engine.submit(prompt, max_new_tokens=14, **each) for each in asked]
    texts = [handle.result().tokens for handle in handles]
    assert texts == [expected, plain.tokens, expected, [9] * 14, expected]
    assert handles[1].result().logprobs == plain.logprobs  # to the bit


def test_a_text_that_begins_again_counts_again():
    sizes = {"slots": 4, "prefill_rows": 1, "prefix_cache": False}
    roomy, small = (Engine(tiny_llm(), pages=pages, **sizes) for pages in (100, 12))
    prompts = [[n, 8, 9] * 5 for n in range(4)]
    asked = {"max_new_tokens": 40, **PENALTIES}
    alone = [roomy.submit(prompt, **asked).result().tokens for prompt in prompts]
    handles = [small.submit(prompt, **asked) for prompt in prompts]
    assert [handle.result().tokens for handle in handles] == alone
    assert small.stats.preemptions > 0


def test_nobody_pays_when_nobody_asks(engine):
    engine.submit([1, 2], max_new_tokens=3, **PENALTIES).result()
    assert engine._runner._state.adjust is not None
    engine.submit([1, 2], max_new_tokens=3, ignore_eos=True).result()
    assert engine._runner._state.adjust is None
