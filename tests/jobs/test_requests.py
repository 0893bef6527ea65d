import json

import pytest

from jkvq.engine.options import Options, mixed_seed
from jkvq.jobs.requests import Request, parse_request, read_request

DEFAULTS = Options(max_new_tokens=9, seed=5)
HELLO = [{"role": "user", "content": "Hello"}]


def read(given) -> Request:
    request = read_request(given, 1, DEFAULTS)
    assert request.error is None
    return request


def openai(url: str = "/v1/completions", **body) -> dict:
    return {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "gpt", **body}}


def chat(**body) -> dict:
    return openai("/v1/chat/completions", **body)


def test_a_plain_line_has_a_prompt_and_options():
    found = read({"id": 7, "prompt": "Hello", "temperature": 0.5, "stop": ["x"], "seed": None})
    assert (found.form, found.custom_id, found.prompt) == ("plain", 7, "Hello")
    options = Options(9, temperature=0.5, stop=["x"], seed=mixed_seed(5, 1))
    assert found.options == options  # chat follows the model
    found = read({"custom_id": "a", "messages": HELLO, "max_new_tokens": 3, "seed": 2})
    assert (found.custom_id, found.prompt) == ("a", HELLO)
    assert found.options == Options(3, seed=2)


def test_biases_are_by_token_whether_or_not_json_wrote_it_as_text():
    for token in ("5", 5):
        found = read({"prompt": "Hello", "logit_bias": {token: 1}})
        assert found.options.logit_bias == {5: 1.0}


def test_a_prompt_alone_is_a_request():
    assert read("Hello").prompt == "Hello"
    assert read(HELLO).prompt == HELLO
    assert read([1, 2, 3]).prompt == [1, 2, 3]


def test_a_completion_is_raw_text_at_openai_s_temperature():
    found = read(openai(prompt="Hello", max_tokens=4, top_p=0.5, top_k=3, min_p=0.1, stop="x"))
    assert (found.form, found.custom_id, found.prompt) == ("completion", "a", "Hello")
    own = {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "stop": "x", "chat": False}
    assert found.options == Options(4, temperature=1.0, seed=mixed_seed(5, 1), **own)
    assert read(openai(prompt=["Hello"])).prompt == "Hello"
    assert read(openai(prompt=[[1, 2]])).prompt == [1, 2]


def test_a_chat_has_messages_of_text_or_of_parts_of_it():
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    found = read(
        chat(
            messages=[{"role": "user", "content": parts, "name": None}],
            max_completion_tokens=4,
            temperature=0,
            repetition_penalty=2,
            seed=3,
        )
    )
    assert (found.form, found.prompt) == ("chat", HELLO)
    assert found.options == Options(4, repetition_penalty=2.0, seed=3, chat=True)


def test_a_body_without_a_url_says_itself_what_it_is():
    assert read({"body": {"messages": HELLO}}).form == "chat"
    assert read({"body": {"prompt": "Hello"}}).form == "completion"


def test_fields_that_ask_for_nothing_are_let_through():
    neutral = {"n": 1, "stream": False, "logprobs": False, "frequency_penalty": 0.0, "tools": []}
    ignored = {"user": "me", "metadata": {"a": "b"}, "store": True, "logit_bias": None}
    formats = {"response_format": {"type": "text"}, "tool_choice": "auto"}
    assert read(chat(messages=HELLO, **neutral, **ignored, **formats)).prompt == HELLO


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "the request has no prompt: a line is"),
        ({"prompt": "a", "messages": HELLO}, "both prompt and messages"),
        ({"prompt": "a", "max_tokens": 3}, "no field 'max_tokens': did you mean max_new_tokens"),
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens=0: a whole number, 1 or more"),
        ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias='a': a number from -100"),
        ({"prompt": "a", "logit_bias": [5]}, r"logit_bias=\[5\]: a number from -100"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": 5}, "5 is no prompt"),
        ({"prompt": ["a", "b"]}, "one prompt, not 2: write a line for each"),
        ({"prompt": "\ud800"}, "no valid Unicode"),
        ({"messages": "a"}, "messages='a': a list of at least one message"),
        ({"messages": ["a"]}, "'a' is no message"),
        ({"messages": [{"role": "user"}]}, "is no message: role and content are needed"),
        ({"custom_id": [1], "prompt": "a"}, r"custom_id=\[1\]: text or a whole number"),
        (chat(), "the body has no messages, which /v1/chat/completions needs"),
        (chat(prompt="a"), "the body has no messages"),
        (openai("/v1/embeddings", input="a"), "url='/v1/embeddings': /v1/chat/completions or"),
        (openai(), "the body has no prompt"),
        ({"body": "a"}, "body='a': an object"),
        ({"method": "GET", "body": {"prompt": "a"}}, "method='GET': POST is the only one"),
        (openai(prompt="a", n=2), "n=2: jkvq does not have this; leave it out or give 1"),
        (openai(prompt="a", logprobs=0), "logprobs=0: .* or give False"),
        (openai(prompt="a", stream=True), "stream=True: "),
        (openai(prompt="a", presence_penalty=5), "presence_penalty=5: "),
        (chat(messages=HELLO, tools=[{"type": "function"}]), "tools="),
        (chat(messages=HELLO, response_format={"type": "xml"}), "response_format="),
        (chat(messages=HELLO, reasoning_effort="low"), "have this; leave it out$"),
        (chat(messages=[{**HELLO[0], "tool_calls": []}]), "a message with tool_calls"),
        (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "content is text"),
        (chat(messages=HELLO, temperature="hot"), "temperature='hot': "),
    ],
)
def test_what_is_no_request_is_an_error_of_its_own(given, sentence):
    request = read_request(given, 1, DEFAULTS)
    assert request.prompt is None
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(request.error)
    assert (request.form == "plain") == ("body" not in given)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"{", "the line is no JSON"),
        (b'{"prompt": "caf\xe9"}', "the line is no UTF-8 text (at byte 15)"),
        (b"[" * 100_000, "the line is no JSON"),
        (b'["a"]', "['a'] is no request"),
    ],
)
def test_a_line_that_is_no_json_is_an_error(line, sentence):
    request = parse_request(line, 1, DEFAULTS)
    assert sentence in (request.error or "")


def test_a_line_may_begin_with_a_byte_order_mark():
    line = b"\xef\xbb\xbf" + json.dumps({"prompt": "é"}).encode()
    assert parse_request(line, 1, DEFAULTS).prompt == "é"


def test_seeds_differ_by_line_and_by_job():
    assert len({mixed_seed(seed, number) for seed in range(3) for number in range(1, 30)}) == 87
