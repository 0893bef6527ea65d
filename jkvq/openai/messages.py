"""Conversations as requests write them."""

from typing import Any

from jkvq.support.arguments import shown
from jkvq.support.errors import UserError


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages of role and content, the latter as text or in parts of text."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"messages={shown(messages)}: a list of at least one message is needed")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise UserError(f"{shown(message)} is no message: role and content are needed, both text")
    given = {name: value for name, value in message.items() if value is not None}
    if more := given.keys() - {"role", "content"}:
        raise UserError(
            f"a message with {', '.join(sorted(more))} is nothing jkvq can read: role and content "
            "are all it has"
        )
    if isinstance(given.get("content"), list):
        given["content"] = "".join(map(_part, given["content"]))
    return given


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise UserError(f'{shown(part)}: content is text or parts of {{"type": "text"}} only')
    return text
