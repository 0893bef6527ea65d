"""Calls in texts, whole and in pieces."""

import json
import random

import pytest

from jkvq.engine.drawing.grammar import Matcher
from jkvq.models.tools import told_in_text
from jkvq.openai.calls import CallReader, whole_calls
from jkvq.openai.tools import read_tools
from tests.tiny import CONFIG, byte_tokenizer

NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": NUMBER}},
    {"type": "function", "function": {"name": "g", "description": "Does nothing."}},
]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


F, G = call("f", '{"x": 12}'), call("g", "{}")
ODD = call("f", r'{"x": 1, "y": "}\n</tool_call>{\"name\": \"<tool_call>"}')


@pytest.mark.parametrize(
    ("text", "content", "calls", "whole"),
    [
        ("Hello <tool", "Hello <tool", [], False),
        ("Hello\n", "Hello\n", [], False),
        ("a < b\n\n<tool_calls> c", "a < b\n\n<tool_calls> c", [], False),
        (F, "", [("f", '{"x": 12}')], True),
        (f"Let me see.\n{F}\n{G}", "Let me see.", [("f", '{"x": 12}'), ("g", "{}")], True),
        (ODD, "", [("f", r'{"x": 1, "y": "}\n</tool_call>{\"name\": \"<tool_call>"}')], True),
        (F[:-13], "", [("f", '{"x": 12}')], True),  # cut
        (F[:-3], "", [("f", '{"x": 12}')], True),
        (F[:20], "", [], False),
        (F[:-16], "", [("f", '{"x": 1')], False),
        (F + G[:-16], "", [("f", '{"x": 12}'), ("g", "")], False),
        (F + G[:20], "", [("f", '{"x": 12}')], False),
    ],
)
def test_calls_are_found_however_the_text_is_cut(text, content, calls, whole):
    def read(pieces: list[str]):
        reader = CallReader()
        said = [reader.read(piece, ended=False) for piece in pieces]
        said.append(reader.read("", ended=True))
        found = whole_calls(piece for each in said for piece in each.calls)
        assert reader.calls == len(found)
        assert [each.called for each in said] == [False] * len(pieces) + [whole]
        for each in said:  # a call is told of once in each
            indices = [piece["index"] for piece in each.calls]
            assert len(set(indices)) == len(indices)
        assert len({each["id"] for each in found}) == len(found)
        functions = [(each["function"]["name"], each["function"]["arguments"]) for each in found]
        return "".join(each.content for each in said), functions

    assert read([text]) == (content, calls)
    assert read(list(text)) == (content, calls)
    chance = random.Random(0)
    for _ in range(20):
        cuts = sorted(chance.choices(range(len(text) + 1), k=5))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        assert read(pieces) == (content, calls)


@pytest.mark.parametrize(
    ("changes", "right", "wrong"),
    [
        ({}, ["Hello", F, f"a\n{F}\n{G}", "<tool"], [call("h", "{}"), call("f", '{"x": "1"}')]),
        ({"parallel_tool_calls": False}, ["Hello", F], [f"{F}\n{G}"]),
        ({"tool_choice": "required"}, [F, f"{F}\n{G}"], ["Hello", f"a{F}"]),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, [G], [F, f"{G}\n{G}"]),
    ],
)
def test_a_grammar_lets_through_what_was_asked_for(changes, right, wrong):
    tokenizer = byte_tokenizer()
    tools = read_tools({"tools": TOOLS, **changes})
    assert tools is not None
    assert [tool["function"]["name"] for tool in tools.listed] == ["f", "g"]
    for text in right + wrong:
        matcher = Matcher(tokenizer, CONFIG.vocab, tools.grammar)
        found = matcher._found.try_consume_tokens(tokenizer.encode(text))
        whole = found == len(text) and matcher._found.is_accepting()
        assert whole == (text in right), text


def test_no_tools_are_none():
    for body in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        assert read_tools(body) is None


def test_a_template_without_tools_is_told_in_text():
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 12}}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "7", "tool_call_id": "a"},
        {"role": "tool", "content": "8", "tool_call_id": "b"},
    ]
    system, user, assistant, results = told_in_text(messages, TOOLS)
    assert system["content"].startswith("Be brief.\n\n# Tools")
    assert all(json.dumps(tool) in system["content"] for tool in TOOLS)
    assert user == messages[1]
    assert assistant == {"role": "assistant", "content": F}
    one, two = (f"<tool_response>\n{each}\n</tool_response>" for each in "78")
    assert results == {"role": "user", "content": f"{one}\n{two}"}
    assert told_in_text(messages[1:2], ()) == messages[1:2]
    assert told_in_text(messages[1:2], TOOLS)[0]["role"] == "system"
