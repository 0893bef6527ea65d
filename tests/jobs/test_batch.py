import dataclasses

import pytest

import jkvq
from tests.tiny import byte_tokenizer

SLOTS = 2


def run(llm, requests, **options) -> list[jkvq.Answer]:
    found = list(jkvq.batch(llm, requests, slots=SLOTS, **options))
    return sorted(found, key=lambda answer: answer.index)


def test_each_request_gets_the_answer_that_it_would_get_alone(tiny):
    prompts = ["Hello", [1, 2, 3], "A prompt of some more words"]
    found = run(tiny, prompts, max_new_tokens=4)
    engine = jkvq.Engine(tiny, slots=SLOTS)
    alone = [engine.submit(prompt, max_new_tokens=4).result() for prompt in prompts]
    assert [answer.index for answer in found] == [0, 1, 2]
    assert [answer.generation.tokens for answer in found if answer.generation] == [
        each.tokens for each in alone
    ]


def test_requests_that_draw_have_seeds_of_their_own_that_are_the_same_again(tiny):
    requests = [{"prompt": "Hello", "temperature": 1.0}] * 3
    first, again, other = (run(tiny, requests, max_new_tokens=4, seed=s) for s in (0, 0, 1))
    texts = [
        [each.generation.tokens for each in found if each.generation]
        for found in (first, again, other)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(map(tuple, texts[0]))) == 3


def test_a_bad_request_stops_nothing(tiny):
    requests = [
        {"prompt": "Hello", "custom_id": "a"},
        {"prompt": "Hello", "temperature": -1, "custom_id": "b"},
        {"prompt": "x" * 2000},  # longer than the context
        {"messages": [{"role": "user", "content": "Hello"}]},  # without a chat template
        {"prompt": [1, 999]},
        {"prompt": "Hello", "stop_tokens": [999]},
        {"prompt": "Hello"},
    ]
    found = run(tiny, requests, max_new_tokens=2)
    assert [answer.generation is not None for answer in found] == [True, *[False] * 5, True]
    sentences = ["temperature=-1", "context is 1024", "no chat template", "token 999", "token 999"]
    for answer, sentence in zip(found[1:-1], sentences, strict=True):
        assert sentence in (answer.error or "")
    assert [found[0].custom_id, found[1].custom_id] == ["a", "b"]
    assert found[0].error is None


def test_whatever_a_chat_template_makes_of_a_request_stops_nothing(tiny):
    tokenizer = byte_tokenizer()
    tokenizer.hf.chat_template = "{{ messages[0]['content'] + 1 }}"
    llm = dataclasses.replace(tiny, tokenizer=tokenizer)
    found = run(llm, ["Hello", {"prompt": "Hello", "chat": False}], max_new_tokens=2)
    assert "the prompt cannot be turned into tokens" in (found[0].error or "")
    assert found[1].error is None


def test_requests_are_taken_as_they_are_needed(tiny):
    taken = answered = 0

    def requests():
        nonlocal taken
        for _ in range(40):
            taken += 1
            assert taken - answered <= 2 * SLOTS
            yield "Hello"

    answers = jkvq.batch(tiny, requests(), slots=SLOTS, max_new_tokens=3)
    assert taken == 0
    for _ in answers:
        answered += 1
        assert taken - answered <= 2 * SLOTS
    assert taken == answered == 40


@pytest.mark.parametrize("requests", ["Hello", {"prompt": "Hello"}, 5])
def test_a_single_request_is_no_list_of_them(tiny, requests):
    with pytest.raises(jkvq.UserError, match="put a single one in brackets"):
        jkvq.batch(tiny, requests)


def test_options_are_refused_at_once(tiny):
    with pytest.raises(jkvq.UserError, match="max_new_tokens=0"):
        jkvq.batch(tiny, [], max_new_tokens=0)
    with pytest.raises(jkvq.UserError, match="slots=0"):
        jkvq.batch(tiny, [], slots=0)
    with pytest.raises(jkvq.UserError, match="'tiny' cannot generate"):
        jkvq.batch("tiny", [])  # pyright: ignore[reportArgumentType]
