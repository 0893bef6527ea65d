"""Calls of tools in a text, as answers have them: found while it is written."""

import json
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jkvq.openai.tools import CLOSE, OPEN

_HEAD = re.compile(r'\s*\{"name": "([^"]*)", "arguments": ')
_END = "}" + CLOSE


@dataclass
class Said:
    """What is new of an answer: text, and pieces of calls, each with the number of its call.

    called: the answer has ended, and there are calls in it, all of them whole.
    """

    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    called: bool = False


class CallReader:
    """Takes a text in pieces; what may yet be the beginning of a mark is held back."""

    def __init__(self):
        self._rest = ""
        self._where = "text"  # or in a call: "head", then "arguments"
        self._written = ""  # arguments of the latest call
        self.calls = 0  # that have begun

    def read(self, text: str, *, ended: bool) -> Said:
        """What is new with some more text; ``ended``: no more comes."""
        self._rest += text
        said = Said()
        while {"text": self._text, "head": self._head, "arguments": self._arguments}[self._where](
            said, ended
        ):
            pass
        said.called = ended and self.calls > 0 and self._is_whole()
        return said

    def _is_whole(self) -> bool:
        """Whether the latest call is; its end mark may be missing, as that may be a stop string."""
        if self._where == "arguments":
            return _is_json(self._written)
        return self._where == "text"

    def _text(self, said: Said, ended: bool) -> bool:
        before, mark, behind = self._rest.partition(OPEN)
        if mark:
            said.content += before.rstrip()
            self._rest, self._where = behind, "head"
            return True
        held = 0 if ended else _overlap(before, OPEN)
        shown = before[: len(before) - held]
        # Space before a call is nobody's; of what follows nothing is known yet.
        certain = len(shown) if ended else len(shown.rstrip())
        said.content += shown[:certain]
        self._rest = before[certain:]
        return False

    def _head(self, said: Said, ended: bool) -> bool:
        found = _HEAD.match(self._rest)
        if found is None:
            return False  # not all of it is there; in a text that was cut, never
        said.calls.append(
            {
                "index": self.calls,
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": found[1], "arguments": ""},
            }
        )
        self.calls += 1
        self._rest, self._where, self._written = self._rest[found.end() :], "arguments", ""
        return True

    def _arguments(self, said: Said, ended: bool) -> bool:
        before, mark, behind = self._rest.partition(_END)
        held = 0 if mark else _overlap(before, _END)
        new, self._rest = before[: len(before) - held], before[len(before) - held :]
        self._written += new
        if new and said.calls:  # they hold the latest call, as one that has ended gets no more
            said.calls[-1]["function"]["arguments"] += new
        elif new:
            said.calls.append({"index": self.calls - 1, "function": {"arguments": new}})
        if mark:
            self._rest, self._where = behind, "text"
        return bool(mark)


def whole_calls(pieces: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls put together from their pieces."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if "id" in piece:
            calls.append({**piece, "function": dict(piece["function"])})
            del calls[-1]["index"]
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return calls


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of a text with which a mark may begin."""
    return next(
        (size for size in range(min(len(text), len(mark)), 0, -1) if mark.startswith(text[-size:])),
        0,
    )
