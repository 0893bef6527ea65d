"""What the body of a request asks for."""

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

from jkvq.engine.drawing.grammar import json_grammar
from jkvq.openai.messages import read_messages
from jkvq.support.arguments import shown
from jkvq.support.errors import UserError

Form = Literal["chat", "completion"]

URLS: dict[Form, str] = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
_PROMPTS: dict[Form, str] = {"chat": "messages", "completion": "prompt"}
_MOST_BIASES = 1024
_LIMITS = ("max_completion_tokens", "max_tokens")  # OpenAI's names of max_new_tokens
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)
# Fields that do not change the answer, whatever they are
_IGNORED = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention"),
)
# Fields that not everyone has, by the values with which they ask for nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
}


def read_body(
    form: Form, body: Mapping[str, Any], also: Collection[str] = ()
) -> tuple[Any, dict[str, Any]]:
    """The prompt of a body, and the fields of `jkvq.Options` that it sets.

    Whatever would change the answer and is not there is refused. Null is as good as left out.

    Args:
        form: of the answer.
        body: as it was sent.
        also: fields that the caller looks at itself.
    """
    given = {name: value for name, value in body.items() if value is not None}
    part = _PROMPTS[form]
    if part not in given:
        raise UserError(f"the body has no {part}, which {URLS[form]} needs")
    known = (part, *_LIMITS, *_SAME, "logit_bias", "response_format", *_IGNORED, *also)
    for name, value in given.items():
        if name not in known and not _asks_nothing(name, value):
            allowed = "".join(f" or give {shown(each)}" for each in _NEUTRAL.get(name, ()))
            raise UserError(
                f"{name}={shown(value)}: jkvq does not have this; leave it out{allowed}"
            )
    options = {"temperature": 1.0, "chat": form == "chat"}  # OpenAI's default is 1
    options |= {name: given[name] for name in _SAME if name in given}
    if "logit_bias" in given:
        options["logit_bias"] = _biases(given["logit_bias"])
    if "response_format" in given:
        options["grammar"] = _format(form, given["response_format"])
    limits = [given[name] for name in _LIMITS if name in given]
    if limits:
        options["max_new_tokens"] = limits[0]
    return read_messages(given[part]) if form == "chat" else given[part], options


def _biases(given: Any) -> dict[int, Any]:
    """What single tokens get, by token, which JSON writes as text."""
    if isinstance(given, dict) and len(given) > _MOST_BIASES:
        raise UserError(f"logit_bias={len(given):,} tokens: at most {_MOST_BIASES:,} can have one")
    if not isinstance(given, dict) or not all(re.fullmatch("[0-9]{1,10}", each) for each in given):
        raise UserError(
            f'logit_bias={shown(given)}: an object of tokens and numbers such as {{"50": -100}}'
        )
    return {int(token): value for token, value in given.items()}


def _format(form: Form, given: Any) -> str | None:
    """The grammar of the format that is asked for; None is free text."""
    kind = given.get("type") if isinstance(given, dict) else None
    schema: Any = {"type": "object"}
    if kind == "json_schema" and form == "chat":
        described = given.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            raise UserError(
                f'response_format={shown(given)}: json_schema has a "schema", which is an object'
            )
    elif kind == "text":
        return None
    elif kind != "json_object" or form != "chat":
        kinds = "text, and in a chat json_object and json_schema"
        raise UserError(f"response_format={shown(given)}: the types are {kinds}")
    return json_grammar(schema)


def _asks_nothing(name: str, value: Any) -> bool:
    # 0 is not False: logprobs=0 asks for those of the drawn tokens.
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in _NEUTRAL.get(name, ())
    )
