"""The tools of a request, and the grammar of a text that calls them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jkvq.engine.drawing.grammar import JSON_STYLE
from jkvq.support.arguments import shown
from jkvq.support.errors import UserError

FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
OPEN, CLOSE = "<tool_call>", "\n</tool_call>"  # around a call; no JSON holds the second
_NAME = "[a-zA-Z0-9_-]{1,64}"
_MOST = 128  # OpenAI's
_CHOICES = ("auto", "required", "none")


@dataclass(frozen=True)
class Tools:
    """What a text may call.

    listed: as the chat template takes them.
    grammar: of a text that calls them as it was asked to.
    """

    listed: list[dict[str, Any]]
    grammar: str


def read_tools(body: Mapping[str, Any]) -> Tools | None:
    """The tools of a body; None if it has none, or none may be called."""
    given, choice = body.get("tools") or [], body.get("tool_choice")
    functions = [_function(tool) for tool in given]
    if choice is None:
        choice = "auto" if functions else "none"
    if not isinstance(choice, dict) and choice not in _CHOICES:
        raise UserError(
            f"tool_choice={shown(choice)}: {', '.join(_CHOICES)}, or a function by name"
        )
    if choice == "none":
        return None
    if not functions:
        raise UserError(f"tool_choice={shown(choice)}: there are no tools to choose from")
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names) or len(names) > _MOST:
        raise UserError(
            f"tools={shown(given)}: up to {_MOST} functions, each with a name of its own"
        )
    several = body.get("parallel_tool_calls") is not False
    callable_now = functions
    if isinstance(choice, dict):
        callable_now, several = [_chosen(choice, functions)], False
    grammar = _grammar(callable_now, must=choice != "auto", several=several)
    listed = [{"type": "function", "function": function} for function in functions]
    return Tools(listed, grammar)


def _function(tool: Any) -> dict[str, Any]:
    """The function of a tool, with its name and the schema of its arguments."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise UserError(f'tools={shown(tool)}: each is {{"type": "function", "function": ...}}')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not re.fullmatch(_NAME, name):
        raise UserError(
            f"tools={shown(name)}: a function's name is letters, digits, _ and -, to 64"
        )
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise UserError(f"tools={shown(parameters)}: parameters are the schema of an object")
    known = {key: function[key] for key in ("description",) if function.get(key) is not None}
    return {"name": name, **known, "parameters": {"type": "object", **parameters}}


def _chosen(choice: dict[str, Any], functions: list[dict[str, Any]]) -> dict[str, Any]:
    named = choice.get("function") if choice.get("type") == "function" else None
    name = named.get("name") if isinstance(named, dict) else None
    for function in functions:
        if function["name"] == name:
            return function
    raise UserError(
        f"tool_choice={shown(choice)}: no function of that name is among the tools; write "
        '{"type": "function", "function": {"name": ...}}'
    )


def _grammar(functions: list[dict[str, Any]], *, must: bool, several: bool) -> str:
    """Calls as Qwen and Hermes write them, in llguidance's Lark; free text before unless they must.

    {"name": "f", "arguments": {...}} stands between the two marks, on a line of its own.
    """
    rules = [f"call: {' | '.join(f'call_{place}' for place in range(len(functions)))}"]
    for place, function in enumerate(functions):
        begin = json.dumps(f'\n{{"name": "{function["name"]}", "arguments": ')
        schema = json.dumps({**function["parameters"], "x-guidance": JSON_STYLE})
        rules.append(f"call_{place}: {begin} %json {schema} {json.dumps('}' + CLOSE)}")
    if must:
        one, next_one = json.dumps(OPEN), json.dumps("\n" + OPEN)
        start = f"start: {one} call" + f" ({next_one} call)*" * several
    else:
        start = "start: TEXT | (open call)" + "+" * several
        rules += [f"open[lazy]: TEXT {json.dumps(OPEN)}", r"TEXT: /(.|\n)*/"]
    return "\n".join([start, *rules])
