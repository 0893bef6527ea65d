"""Tools in conversations whose chat template knows none: told as Qwen and Hermes have them."""

import json
from collections.abc import Sequence
from typing import Any

_INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def told_in_text(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The same conversation in roles and contents alone: its tools, and calls and their results."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if plain and plain[-1]["content"].endswith("\n</tool_response>"):
                content = f"{plain.pop()['content']}\n{content}"
        calls = [_call(each["function"]) for each in message.get("tool_calls", ())]
        plain.append({"role": role, "content": "\n".join([content] * bool(content) + calls)})
    if tools:
        signatures = "\n".join(json.dumps(tool) for tool in tools)
        introduction = _INTRODUCTION.format(signatures=signatures)
        if plain and plain[0]["role"] == "system":
            first = plain.pop(0)["content"]
            introduction = f"{first}\n\n{introduction}"
        plain.insert(0, {"role": "system", "content": introduction})
    return plain


def _call(function: dict[str, Any]) -> str:
    written = json.dumps({"name": function["name"], "arguments": function["arguments"]})
    return f"<tool_call>\n{written}\n</tool_call>"
