"""Answers of a form that was asked for: JSON by a schema, and calls of tools."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tests.server.test_answers import HELLO, complete

SCHEMA: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in "fg"
]


def ask(client, **options) -> Any:
    given = {"max_tokens": 300, "temperature": 1.0, "seed": 3, **options}
    return client.chat.completions.create(model="tiny", messages=HELLO, **given)


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_follows_its_schema_whole_or_streamed(client, seed):
    whole = ask(client, response_format=FORMAT, seed=seed).choices[0]
    jsonschema.validate(json.loads(whole.message.content), SCHEMA)
    assert whole.finish_reason == "stop"
    chunks = [
        each.choices[0] for each in ask(client, response_format=FORMAT, seed=seed, stream=True)
    ]
    assert "".join(chunk.delta.content for chunk in chunks) == whole.message.content


def test_an_object_is_one(client):
    bias = {"1": 3, "92": 5}  # a quote and a brace, as a random model ends no string
    found = ask(client, response_format={"type": "json_object"}, logit_bias=bias, seed=1)
    assert isinstance(json.loads(found.choices[0].message.content), dict)
    text = ask(client, response_format={"type": "text"}, max_tokens=5)
    assert text.choices[0].message.content == ask(client, max_tokens=5).choices[0].message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
def test_tools_are_called_whole_or_streamed(client, choice):
    asked = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    whole = ask(client, **asked).choices[0]
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content, call.type) == (
        "tool_calls",
        None,
        "function",
    )
    assert call.function.name in ("fg" if choice == "required" else "g")
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    name, arguments, reason = "", "", None
    for chunk in ask(client, **asked, stream=True):
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
        assert not delta.content
        for piece in delta.tool_calls or ():
            assert piece.index == 0 and bool(piece.id) == bool(piece.function.name)
            name += piece.function.name or ""
            arguments += piece.function.arguments
    assert (name, arguments, reason) == (call.function.name, call.function.arguments, "tool_calls")
    # What was called can be answered, and the conversation goes on.
    messages = [*HELLO, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
    again = client.chat.completions.create(
        model="tiny", messages=messages, tools=TOOLS[:1], max_tokens=3
    )
    assert again.usage.prompt_tokens > 300  # the tools are told


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_a_stop_string_cuts_is_none_that_can_be_run(client, stream):
    asked = {"tools": TOOLS, "tool_choice": "required", "stop": '"age"', "stream": stream}
    found = ask(client, **asked)
    *_, last = [chunk.choices[0] for chunk in found] if stream else found.choices
    assert last.finish_reason == "stop"


def test_text_may_come_instead_of_a_call(client):
    found = ask(client, tools=TOOLS, max_tokens=20).choices[0]
    assert found.message.content and found.message.tool_calls is None
    none = ask(client, tools=TOOLS, tool_choice="none", max_tokens=20)
    assert none.choices[0].message.content == ask(client, max_tokens=20).choices[0].message.content


def test_whoever_is_beside_a_grammar_gets_his_own_text(client):
    def plain(number: int) -> str:
        options = {"temperature": 0, "max_tokens": 30}
        return complete(client, f"Prompt {number}", **options).choices[0].text

    def mixed(number: int) -> str:
        if number % 2:
            return plain(number)
        if number % 4:
            penalties = {"frequency_penalty": 1.0, "logprobs": 2}
            return complete(client, "a", max_tokens=30, **penalties).choices[0].text
        return ask(client, response_format=FORMAT, seed=number).choices[0].message.content

    alone = [plain(number) for number in range(1, 12, 2)]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(mixed, range(12)))
    assert together[1::2] == alone
    for text in together[::4]:
        jsonschema.validate(json.loads(text), SCHEMA)
