"""The tools of a request, and the grammar of a text that calls them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jkvq.engine.drawing.grammar import JSON_STYLE
from jkvq.support.arguments import shown
from jkvq.support.errors import UserError

FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
OPEN, CLOSE = "<tool_call>", "\n</tool_call>"  # around a call; no JSON holds the second


@dataclass(frozen=True)
class Tools:
    """What a text may call.

    listed: as the chat template takes them.
    grammar: of a text that calls them as it was asked to.
    """

    listed: list[dict[str, Any]]
    grammar: str


def read_tools(body: Mapping[str, Any]) -> Tools | None:
    """The tools of a body of the right types; None if it has none, or none may be called."""
    functions = [_function(tool["function"]) for tool in body.get("tools") or ()]
    choice = body.get("tool_choice") or ("auto" if functions else "none")
    if choice == "none":
        return None
    if not functions:
        raise UserError(f"tool_choice={shown(choice)}: there are no tools to choose from")
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names):
        raise UserError(f"tools={shown(names)}: each function has a name of its own")
    several, callable_now = body.get("parallel_tool_calls") is not False, functions
    if choice not in ("auto", "required"):
        name, several = choice["function"]["name"], False
        callable_now = [each for each in functions if each["name"] == name]
        if not callable_now:
            raise UserError(f"tool_choice={shown(choice)}: no function of that name is in tools")
    grammar = _grammar(callable_now, must=choice != "auto", several=several)
    listed = [{"type": "function", "function": function} for function in functions]
    return Tools(listed, grammar)


def _function(given: Mapping[str, Any]) -> dict[str, Any]:
    """A function as templates take it: with its name and the schema of its arguments."""
    parameters = given.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if parameters.get("type", "object") != "object":
        raise UserError(f"tools={shown(parameters)}: parameters are the schema of an object")
    described = given.get("description")
    return {
        "name": given["name"],
        **({} if described is None else {"description": described}),
        "parameters": {"type": "object", **parameters},
    }


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
