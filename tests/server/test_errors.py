"""What goes wrong is told in OpenAI's form, and touches nobody else."""

import dataclasses
import json
import threading
from typing import Any

import httpx
import openai
import pytest

from jkvq.openai.messages import read_messages
from jkvq.server.door import MOST_BYTES
from jkvq.server.server import Server, bind
from tests.server.conftest import Running, running
from tests.tiny import byte_tokenizer

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


JSON = {"type": "json_object"}
CHOICE = {"type": "function", "function": {"name": "g"}}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def schema(given: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    (name, error), *others = response.json().items()
    assert (name, others) == ("error", [])
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("change", "param", "sentence"),
    [
        ({"messages": []}, "messages", "messages=[]: a list of at least one message is needed"),
        ({"messages": 5}, "messages", "messages=5: a valid list"),
        ({"messages": [{"role": 5, "content": "a"}]}, "messages", "messages[0].role=5: a valid"),
        ({"messages": [{"role": "user", "content": ""}], "stop": ""}, "stop", "stop=''"),
        ({"temperature": "hot"}, "temperature", "temperature='hot': a valid number"),
        ({"temperature": -1}, "temperature", "temperature=-1.0: a number, 0"),
        ({"top_p": 0}, "top_p", "top_p=0.0: a number above 0"),
        ({"seed": -1}, "seed", "seed=-1: a whole number from 0"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0: greater than or equal to 1"),
        ({"max_tokens": "9"}, "max_tokens", "max_tokens='9': a valid integer"),
        ({"n": 129}, "n", "n=129: less than or equal to 128"),
        ({"stop": 5}, "stop", "stop=5: a valid string or a valid list"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 items"),
        ({"stream": True, "stream_options": {"a": 1}}, "stream_options", "jkvq does not have this"),
        ({"stream_options": {}}, None, "stream_options goes with stream=true"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0] has no function"),
        ({"tools": [{**tool("f"), "type": "x"}]}, "tools", "tools[0].type='x': 'function'"),
        ({"tools": [tool("a b")]}, "tools", "tools[0].function.name='a b': String should match"),
        ({"tools": [{**tool("f"), "a": 1}]}, "tools", "tools[0].a=1: jkvq does not have this"),
        ({"tools": [tool("f"), tool("f")]}, "tools", "each function has a name of its own"),
        ({"tools": [tool("f", {"type": "array"})]}, "tools", "parameters are the schema of an ob"),
        ({"tools": [tool("f", {"properties": 5})]}, None, "the grammar or schema cannot be used"),
        ({"tools": [tool("f")], "tool_choice": "g"}, "tool_choice", "'none', 'auto' or 'requ"),
        ({"tools": [tool("f")], "tool_choice": CHOICE}, "tool_choice", "no function of that"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools to choose from"),
        ({"tools": [tool("f")], "response_format": JSON}, None, "response_format goes without"),
        ({"response_format": {"type": "xml"}}, "response_format", "'json_object' or 'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", 'has a "schema"'),
        ({"response_format": schema({"type": "foo"})}, None, "cannot be used: Invalid type: foo"),
        ({"response_format": schema({"$ref": "#"})}, None, "no text follows it to its end"),
        (
            {"response_format": schema({"maximum": float("nan")})},
            None,
            "schema cannot be used: exp",
        ),
        (
            {"response_format": {**JSON, "a": 1}},
            "response_format",
            "response_format.a=1: jkvq does",
        ),
        ({"response_format": {**schema({}), "a": 1}}, "response_format", "jkvq does not have this"),
        ({"response_format": JSON, "ignore_eos": True}, "ignore_eos", "ends where that does"),
        ({"messages": [{"role": "user"}]}, None, "role and content are needed"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, None, "a message wit"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls", "a call has a f"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "an object of tokens and numbers such as"),
        (
            {"logit_bias": {"5": 101}},
            "logit_bias",
            "logit_bias=101.0: a number from -100 to 100 for",
        ),
        ({"logit_bias": {"257": 1}}, None, "logit_bias: token 257 is outside the vocabulary"),
        (
            {"logit_bias": dict.fromkeys(map(str, range(1025)), 1)},
            "logit_bias",
            "1,025 tokens: at mo",
        ),
        ({"presence_penalty": 2.5}, "presence_penalty", "2.5: a number from -2 to 2; 0 is off"),
        ({"top_logprobs": 2}, None, "top_logprobs goes with logprobs=true"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
        ({"echo": True}, "echo", "jkvq does not have this; leave it out or give False"),
        ({"unheard_of": 1}, "unheard_of", "unheard_of=1: jkvq does not have this"),
        ({"unheard\ud800of": 1}, None, "send a JSON object, in valid Unicode"),
    ],
)
def test_a_bad_field_is_refused_with_a_sentence(served, change, param, sentence):
    body = json.dumps({**HELLO, **change})  # with halves of characters, which httpx refuses
    headers = {"Content-Type": "application/json"}
    error = error_of(served.http.post(CHAT, content=body, headers=headers), 400)
    assert sentence in error["message"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens"),
        ({"max_completion_tokens": -5}, "max_completion_tokens"),
        ({"max_completion_tokens": 2**40}, "max_completion_tokens"),
        ({"suffix": "a"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": [[1], ["a"]]}, "prompt"),
        ({"prompt": [999]}, None),
    ],
)
def test_a_completion_refuses_what_it_does_not_have(served, change, param):
    response = served.http.post(COMPLETIONS, json={"prompt": "Hello", **change})
    assert error_of(response, 400)["param"] == param


def test_fields_that_change_nothing_are_let_through(served):
    nothing = {"user": "me", "metadata": {"a": "b"}, "store": True, "frequency_penalty": 0}
    nothing |= {"prompt_cache_retention": "24h", "tools": None}
    nothing |= {"stream": True, "stream_options": {"include_obfuscation": False}}
    nothing["stream_options"] |= {"include_usage": True, "continuous_usage_stats": True}
    messages = [{"role": "user", "name": "Ada", "content": "Hello"}]
    response = served.http.post(CHAT, json={**HELLO, **nothing, "messages": messages})
    assert response.status_code == 200
    assert read_messages(messages) == messages


def test_what_is_counted_has_no_other_fields(served):
    same = [{}, {"add_special_tokens": True}, {"add_generation_prompt": True}]
    counts = [served.http.post("/tokenize", json={"prompt": "a", **each}).json() for each in same]
    assert counts[0] == counts[1] == counts[2]
    assert served.http.post("/tokenize", json={"prompt": "a", "add_special_tokens": False}).is_error
    error = error_of(served.http.post("/tokenize", json={"prompt": "a", "add": 1}), 400)
    assert error["message"] == "add=1: jkvq does not have this; leave it out"


def test_a_connection_that_ends_with_a_failure_says_so(served, monkeypatch):
    monkeypatch.setattr("jkvq.server.app.read_asked", lambda form, body: 1 / 0)
    response = served.http.post(CHAT, json=HELLO)
    assert "its log says why" in error_of(response, 500)["message"]
    assert response.headers["Connection"] == "close"  # and nobody uses it again


def test_clients_see_errors_as_their_own(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**HELLO, model="tiny", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(
        openai.NotFoundError, match="no model 'gpt' here: ask for 'tiny'"
    ) as unknown:
        client.chat.completions.create(**HELLO, model="gpt")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match=r"1025 tokens and .* context is 1024") as long:
        client.completions.create(model="tiny", prompt="a" * 1025)
    assert long.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "the request has no body"),
        (b"{", "the body is no JSON"),
        (b"\xff", "the body"),
        (b"[]", "the body is []: send a JSON object"),
        (b"null", "the body is None: send a JSON object"),
        (b"{}", "the body has no messages"),
        (b"[" * 100_000, "the body cannot be read as JSON"),
    ],
)
def test_a_body_that_is_none_is_refused(served, body, sentence):
    headers = {"Content-Type": "application/json"}
    error = error_of(served.http.post(CHAT, content=body, headers=headers), 400)
    assert error["message"].startswith(sentence)


def test_a_body_of_another_type_is_told_its_header(served):
    response = served.http.post(CHAT, content=json.dumps(HELLO))
    assert "add the header Content-Type" in error_of(response, 400)["message"]


def test_a_body_that_is_too_long_is_refused_as_soon_as_that_is_seen(served):
    def endless():
        for _ in range(MOST_BYTES // 1000 + 2):
            yield b"a" * 1000

    for content in (b"a" * (MOST_BYTES + 1), endless()):
        response = served.http.post(COMPLETIONS, content=content)
        assert "more than 4,194,304 bytes" in error_of(response, 413)["message"]


def test_what_is_not_there_is_said(served):
    assert "nothing at '/v1/nope'" in error_of(served.http.get("/v1/nope"), 404)["message"]
    wrong = served.http.get(CHAT)
    assert "GET is no method of" in error_of(wrong, 405)["message"]
    assert "use POST" in wrong.json()["error"]["message"]
    assert wrong.headers["Allow"] == "POST"


def test_a_model_without_a_template_says_where_to_go(tiny):
    with running(tiny) as served:
        for path in (CHAT, "/tokenize"):
            response = served.http.post(path, json={"messages": HELLO["messages"]})
            assert "send its text to /v1/completions" in error_of(response, 400)["message"]


def test_what_a_template_says_of_messages_is_told(chatty):
    tokenizer = byte_tokenizer()
    tokenizer.hf.chat_template = "{{ raise_exception('no ' + messages[0].role) }}"
    with running(dataclasses.replace(chatty, tokenizer=tokenizer)) as served:
        body = json.dumps({"messages": [{"role": "half \ud800", "content": "Hello"}]})
        headers = {"Content-Type": "application/json"}
        error = error_of(served.http.post(CHAT, content=body, headers=headers), 400)
        assert error["message"].endswith("refuses these messages: no half \ud800")


def test_a_request_that_fails_in_the_engine_fails_alone(served, monkeypatch):
    engine, submit = served.server.driver.engine, served.server.driver.engine.submit_tokens

    def fail_at_42(tokens, options):
        if tokens == [42]:
            raise RuntimeError("a bug")
        return submit(tokens, options)

    monkeypatch.setattr(engine, "submit_tokens", fail_at_42)
    error = error_of(served.http.post(COMPLETIONS, json={"prompt": [[41], [42]]}), 500)
    assert error["type"] == "server_error"
    served.wait_until("jkvq_running", 0)  # the text beside it is ended too
    assert served.http.post(COMPLETIONS, json={"prompt": [41]}).status_code == 200


def test_a_text_that_fails_is_an_error_whole_or_streamed(served, monkeypatch):
    monkeypatch.setattr("jkvq.engine.detokenize.TextStream.add", lambda self, tokens: 1 / 0)
    body = {"prompt": "Hello", "max_tokens": 3}
    error = error_of(served.http.post(COMPLETIONS, json=body), 500)
    assert "cannot be written: division by zero" in error["message"]
    streamed = served.http.post(COMPLETIONS, json={**body, "stream": True})
    (event,) = streamed.text.strip().split("\n\n")  # and no [DONE]
    assert "cannot be written" in json.loads(event.removeprefix("data: "))["error"]["message"]


def test_a_server_ends_when_its_engine_fails(chatty, monkeypatch):
    place = bind("127.0.0.1", 0)
    server = Server(chatty, place, name="tiny", slots=1)
    monkeypatch.setattr(server.driver.engine, "step", lambda: 1 / 0)
    raised = []

    def run() -> None:
        try:
            server.run()
        except ZeroDivisionError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    served = Running(server, f"http://127.0.0.1:{place.getsockname()[1]}", chatty)
    response = served.http.post(CHAT, json=HELLO)
    assert "the engine has failed" in error_of(response, 500)["message"]
    thread.join(10)
    assert len(raised) == 1
