"""Conversations as requests write them."""

import json
from typing import Any

from jkvq.support.arguments import shown
from jkvq.support.errors import UserError

# What messages of some roles may have besides
_ALSO = {"assistant": ("tool_calls", "refusal"), "tool": ("tool_call_id",)}


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages of role and content, the latter as text or in parts of text; calls of tools too."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"messages={shown(messages)}: a list of at least one message is needed")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise UserError(f"{shown(message)} is no message: role and content are needed, both text")
    given = {name: value for name, value in message.items() if value is not None}
    known = {"role", "content", "name", *_ALSO.get(str(given.get("role")), ())}
    if more := given.keys() - known:
        raise UserError(
            f"a message with {', '.join(sorted(more))} is nothing jkvq can read: role, content and "
            "name are all it has, and those of an assistant and a tool tool_calls and tool_call_id"
        )
    if calls := given.pop("tool_calls", None):
        if not isinstance(calls, list):
            raise UserError(f"tool_calls={shown(calls)}: a list of calls is needed")
        given |= {"tool_calls": list(map(_call, calls)), "content": given.get("content", "")}
    if isinstance(given.get("content"), list):
        given["content"] = "".join(map(_part, given["content"]))
    return given


def _call(call: Any) -> dict[str, Any]:
    """A call with its arguments as an object, which is what chat templates take."""
    try:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    except (TypeError, KeyError, ValueError, RecursionError):
        name, arguments = None, None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise UserError(
            f"tool_calls={shown(call)}: a call has a function with its name and its arguments, "
            "an object of JSON as text"
        )
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise UserError(f'{shown(part)}: content is text or parts of {{"type": "text"}} only')
    return text
