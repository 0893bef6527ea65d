"""What clients get is what `jkvq.generate` gives."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jkvq
from jkvq.engine.forward import forward
from jkvq.evaluation.likelihood import _empty
from jkvq.models.decoder import logits
from jkvq.openai.logprobs import Logprobs
from jkvq.server.answering import _json_in_pieces

HELLO: Any = [{"role": "user", "content": "Hello"}]
DRAWN = {"temperature": 1.0, "seed": 3}


def written(served, prompts: list, **options) -> list[jkvq.Generation]:
    """What each prompt would get without a server."""
    return jkvq.generate(served.llm, prompts, chat=False, **options)


def chat(client, **options) -> Any:
    return client.chat.completions.create(
        model="tiny", messages=HELLO, **{"max_tokens": 12, **DRAWN, **options}
    )


def complete(client, prompt: Any = "Hello", **options) -> Any:
    return client.completions.create(
        model="tiny", prompt=prompt, **{"max_tokens": 12, **DRAWN, **options}
    )


def test_a_chat_gets_what_generate_gives(served, client):
    (expected,) = written(served, [HELLO], max_new_tokens=12, **DRAWN)
    found = chat(client)
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == expected.finish_reason
    assert choice.logprobs is None
    assert (found.object, found.model, found.id[:9]) == ("chat.completion", "tiny", "chatcmpl-")
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.prompt_tokens, 12)
    assert usage.total_tokens == expected.prompt_tokens + 12
    assert chat(client).id != found.id


def test_prompts_get_n_texts_each(served, client):
    given = written(served, [[5, 6], [5, 6], [7], [7]], max_new_tokens=5, **DRAWN)
    found = complete(client, [[5, 6], [7]], n=2, max_tokens=5)
    assert [choice.text for choice in found.choices] == [each.text for each in given]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in found.choices}) == 4
    drawn = sum(len(each.tokens) for each in given)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (3, drawn)


def test_a_seed_gives_the_same_text_again_and_another_another(client):
    texts = [chat(client, seed=seed).choices[0].message.content for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]
    texts = [chat(client, seed=None).choices[0].message.content for _ in range(2)]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.3, "top_p": 0.5},
        {"temperature": 2.0, "extra_body": {"top_k": 3}},
        {"temperature": 2.0, "extra_body": {"min_p": 0.2}},
        {"temperature": 0.0, "extra_body": {"repetition_penalty": 1.5}},
        {"temperature": 0.0, "frequency_penalty": 2.0},
        {"temperature": 0.0, "presence_penalty": 2.0},
    ],
)
def test_the_rules_of_drawing_reach_the_engine(served, client, options):
    rules = {**options, **options.get("extra_body", {})}
    rules.pop("extra_body", None)
    (expected,) = written(served, ["Hello"], max_new_tokens=12, seed=3, **rules)
    (plain,) = written(served, ["Hello"], max_new_tokens=12, seed=3, temperature=1.0)
    assert complete(client, **options).choices[0].text == expected.text != plain.text


def test_a_bias_is_by_token(client):
    found = complete(client, max_tokens=4, logit_bias={"44": 100})
    tokens = client.completions.create(model="tiny", prompt=[44], max_tokens=1)
    assert found.choices[0].text == found.choices[0].text[0] * 4
    assert found.usage.completion_tokens == 4 and tokens.usage.prompt_tokens == 1


def test_a_stop_string_ends_a_text_whole_or_streamed(served, client):
    whole = complete(client).choices[0].text
    stop = whole[5]
    cut = whole[: whole.index(stop)]
    found = complete(client, stop=[stop, "never there"]).choices[0]
    assert (found.text, found.finish_reason) == (cut, "stop")
    pieces = [chunk.choices[0] for chunk in complete(client, stop=stop, stream=True)]
    assert "".join(piece.text for piece in pieces) == cut
    assert [piece.finish_reason for piece in pieces] == [*[None] * (len(pieces) - 1), "stop"]


def test_an_answer_has_openai_s_length_unless_told(served, client):
    assert complete(client, max_tokens=None).usage.completion_tokens == 16
    long = [{"role": "user", "content": "a" * 1000}]
    (expected,) = written(served, [long], max_new_tokens=999)
    found = client.chat.completions.create(model="tiny", messages=long, temperature=0)
    assert found.choices[0].message.content == expected.text  # up to the end of the context
    assert found.usage.total_tokens == served.llm.config.context


def test_a_stream_adds_up_to_the_whole_answer(client):
    whole = chat(client, n=2)
    chunks = list(chat(client, n=2, stream=True, stream_options={"include_usage": True}))
    *pieces, last = chunks
    texts, reasons = ["", ""], [None, None]
    for chunk in pieces:
        (choice,) = chunk.choices
        assert reasons[choice.index] is None
        assert choice.delta.role == (None if texts[choice.index] else "assistant")
        texts[choice.index] += choice.delta.content
        reasons[choice.index] = choice.finish_reason
        assert chunk.usage is None
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert len(pieces) > 4  # as they come
    assert (last.choices, last.usage) == ([], whole.usage)
    assert len({chunk.id for chunk in chunks}) == 1


def test_logprobs_are_those_of_the_tokens_that_were_drawn(served, client):
    (expected,) = written(served, [HELLO], max_new_tokens=12, **DRAWN)
    content = chat(client, logprobs=True).choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx(expected.logprobs)
    names = [served.llm.tokenizer.decode([token]) for token in expected.tokens]
    assert [entry.token for entry in content] == names
    assert all(entry.bytes in (None, list(entry.token.encode())) for entry in content)
    streamed = [
        entry
        for chunk in chat(client, logprobs=True, stream=True)
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == content
    (expected,) = written(served, ["Hello"], max_new_tokens=12, **DRAWN)
    found = complete(client, logprobs=0).choices[0].logprobs
    assert found.token_logprobs == pytest.approx(expected.logprobs)
    assert found.text_offset == list(range(12))  # a character each


def forced(llm, tokens: list[int]) -> np.ndarray:
    """Log probabilities of all tokens at each place, by one pass over all of them."""
    width = 1 << (len(tokens) - 1).bit_length()
    padded = jnp.asarray([tokens + [0] * (width - len(tokens))])
    run = llm.config, llm.params, llm.basis, _empty(llm, 1, width), padded
    hidden, _ = forward(*run, jnp.array([len(tokens)]), phase="forced")
    scores = np.asarray(logits(llm.config, llm.params, hidden), np.float64)[0, : len(tokens)]
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def test_top_logprobs_are_the_likeliest_of_the_model(served, client):
    prompt = list(range(5, 45))
    found = complete(client, prompt, logprobs=5, temperature=1.5, max_tokens=6).choices[0]
    (plain,) = written(served, [prompt], max_new_tokens=6, temperature=1.5, seed=3)
    tokens = prompt + plain.tokens
    expected = forced(served.llm, tokens)[39:-1]
    for place, row in enumerate(expected):
        best = np.argsort(-row)[:5]
        named = {served.llm.tokenizer.decode([token]): row[token] for token in reversed(best)}
        drawn = tokens[40 + place]
        named.setdefault(served.llm.tokenizer.decode([drawn]), row[drawn])
        assert found.logprobs.top_logprobs[place] == pytest.approx(named, abs=1e-4)
        assert found.logprobs.token_logprobs[place] == pytest.approx(row[drawn], abs=1e-4)
    content = chat(client, logprobs=True, top_logprobs=3, stream=True)
    entries = [entry for chunk in content for entry in chunk.choices[0].logprobs.content]
    assert len(entries) == 12
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob >= max(t.logprob for t in entry.top_logprobs)
        assert entry.logprob <= entry.top_logprobs[0].logprob


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_the_logprobs_of_the_prompt(served, client, stream):
    """Of prompts of several chunks (256 tokens), some of which are stored before."""
    prompt = (list(range(3, 250)) * 3)[:600]
    complete(client, prompt, max_tokens=1)
    asked = {"echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0}
    found = complete(client, prompt, **asked, stream=stream)
    answers = [choice for each in (found if stream else [found]) for choice in each.choices]
    text = "".join(choice.text for choice in answers)
    named = [token for choice in answers for token in choice.logprobs.tokens]
    numbers = [value for choice in answers for value in choice.logprobs.token_logprobs]
    tops = [top for choice in answers for top in choice.logprobs.top_logprobs]
    (plain,) = written(served, [prompt], max_new_tokens=2)
    drawn = plain.tokens
    assert text == served.llm.tokenizer.decode(prompt) + plain.text
    assert named == [served.llm.tokenizer.decode([token]) for token in prompt + drawn]
    row = forced(served.llm, [*prompt, *drawn])
    expected = [row[place, token] for place, token in enumerate([*prompt, *drawn][1:])]
    assert numbers[0] is None and tops[0] is None and len(numbers) == 602
    assert numbers[1:] == pytest.approx(expected, abs=1e-4)
    assert [max(top.values()) for top in tops[1:]] == pytest.approx(row[:-1].max(-1), abs=1e-4)
    assert numbers[-2:] == [max(top.values()) for top in tops[-2:]]  # drawn as the likeliest


def test_an_echo_alone_draws_nothing(served, client):
    found = complete(client, ["Hello", "You"], echo=True, max_tokens=0, logprobs=0)
    assert [choice.text for choice in found.choices] == ["Hello", "You"]
    assert [choice.finish_reason for choice in found.choices] == ["length", "length"]
    assert found.usage.completion_tokens == 0
    assert [len(choice.logprobs.tokens) for choice in found.choices] == [5, 3]
    assert found.choices[1].logprobs.text_offset == [0, 1, 2]
    text = "Ün<end>s"
    shown = complete(client, text, echo=True, max_tokens=0, logprobs=0).choices[0]
    assert (shown.text, shown.logprobs.text_offset) == (text, [0, 0, 1, 2, 7])
    plain = complete(client, "Hello", echo=True, max_tokens=3)
    assert plain.choices[0].text == "Hello" + complete(client, max_tokens=3).choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_many_logprobs_are_written_where_nobody_waits(served, client, stream, monkeypatch):
    threads, make = {}, Logprobs.next

    def seen(self, scores):
        threads[len(scores.tokens) > 256] = threading.current_thread()
        return make(self, scores)

    monkeypatch.setattr(Logprobs, "next", seen)
    asked = {"echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream}
    for length in (200, 300):
        list(complete(client, "a" * length, **asked))
    assert threads[True] != threads[False]


def test_json_in_pieces_is_the_same():
    body = {"a": [{"b": [None, "ü", {"c": [1, [2.5, {}], True]}]}, []], "d": {}}
    assert _json_in_pieces(body) == json.dumps(body)


def test_a_prompt_that_is_stored_counts_as_cached(client):
    prompt = list(range(1, 256)) * 2  # one chunk of 256 tokens, and more
    first, again = (complete(client, prompt, max_tokens=2).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens == 0
    assert again.prompt_tokens_details.cached_tokens == 256


def test_sixty_four_at_once_get_the_texts_that_they_get_alone(served, client):
    def ask(number: int) -> str:
        """Some whole, some streamed; those that come later may end before."""
        options = {"temperature": 0, "max_tokens": 10 + 7 * number % 16}
        if number % 2:
            return complete(client, f"Prompt {number}", **options).choices[0].text
        chunks = complete(client, f"Prompt {number}", stream=True, **options)
        return "".join(chunk.choices[0].text for chunk in chunks)

    alone = [ask(number) for number in range(16)]
    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(ask, [*range(16)] * 4)) == alone * 4
    assert len(set(alone)) == 16


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_tokens_are_counted_as_the_engine_counts_them(served, client):
    found = served.http.post("/tokenize", json={"prompt": "Hello"}).json()
    tokens = served.llm.tokenizer.encode("Hello")
    assert found == {"tokens": tokens, "count": 5, "max_model_len": served.llm.config.context}
    found = served.http.post("/tokenize", json={"messages": HELLO}).json()
    assert found["count"] == chat(client).usage.prompt_tokens
    assert served.http.post("/tokenize", json={"prompt": "a" * 5000}).json()["count"] == 5000


def test_figures_move(served, client):
    def figures() -> list[float]:
        names = (
            "drawn_tokens_total",
            "time_to_first_token_seconds_count",
            "prefilled_tokens_total",
        )
        return [served.figure(f"jkvq_{name}") for name in names]

    before = figures()
    found = complete(client, [[1, 2, 3], [4]]).usage
    served.wait_until("jkvq_drawn_tokens_total", before[0] + found.completion_tokens)
    assert [new - old for new, old in zip(figures(), before, strict=True)] == [
        found.completion_tokens,
        2,
        4,
    ]
    assert served.figure('jkvq_pages{pool="packed"}') == 4 * 1024 / 8
