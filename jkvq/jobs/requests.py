"""What a request of a batch may be: a plain line, a line of OpenAI's batches, or a prompt."""

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from jkvq.engine.options import Options, mixed_seed
from jkvq.engine.prompt import Prompt, as_batch
from jkvq.jobs.openai import openai_request
from jkvq.openai.body import Form
from jkvq.openai.messages import read_messages
from jkvq.support.arguments import shown
from jkvq.support.errors import UserError, nearest

_OPTIONS = [field.name for field in dataclasses.fields(Options)]
_IDENTITY = ("custom_id", "id")
_PLAIN = [*_IDENTITY, "prompt", "messages", "metadata", *_OPTIONS]  # metadata is not looked at
_LINE = (
    'a line is {"prompt": "..."} or {"messages": [...]}, with options if you like, or one of '
    'OpenAI\'s batches with "custom_id", "url" and "body"'
)


@dataclass(frozen=True)
class Request:
    """A request as it was read; one that is refused has an ``error`` and no prompt.

    form: of its answer: OpenAI's chat or completion, or jkvq's own.
    custom_id: as its author calls it.
    """

    form: Form | Literal["plain"]
    custom_id: str | int | None
    prompt: Prompt | None
    options: Options
    error: str | None = None


def read_request(given: Any, number: int, defaults: Options) -> Request:
    """A request from a dict of a line's form, or from a prompt alone.

    Args:
        given: what a line holds, or a prompt.
        number: of the line, from 1.
        defaults: of what the request does not say. Their seed is the job's: a request without one
            gets a seed made of it and of the number, the same in every run.
    """
    found = given if isinstance(given, dict) else {"prompt": given}
    is_openai = any(name in found for name in ("body", "url", "method"))
    form: Form | Literal["plain"] = "chat" if is_openai else "plain"
    name = next((found[key] for key in _IDENTITY if found.get(key) is not None), None)
    custom_id = name if isinstance(name, str | int) and not isinstance(name, bool) else None
    seeded = dataclasses.replace(defaults, seed=mixed_seed(defaults.seed or 0, number))
    try:
        if custom_id is not name:
            raise UserError(f"custom_id={shown(name)}: text or a whole number")
        if is_openai:
            form, prompt, changes = openai_request(found)
        else:
            prompt, changes = _plain_request(found)
        options = dataclasses.replace(seeded, **changes)
        return Request(form, custom_id, _single(prompt), options)
    except UserError as error:
        return Request(form, custom_id, None, seeded, str(error))


def parse_request(line: bytes, number: int, defaults: Options) -> Request:
    """A request from a line of a file."""
    try:
        found = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        problem = f"the line is no UTF-8 text (at byte {error.start})"
    except (ValueError, RecursionError) as error:
        problem = f"the line is no JSON ({error})"
    else:
        if isinstance(found, dict):
            return read_request(found, number, defaults)
        problem = f"{shown(found)} is no request"
    return Request("plain", None, None, defaults, f"{problem}: {_LINE}")


def _plain_request(found: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The prompt of a plain line and the options that it sets; null is as good as left out."""
    given = {name: value for name, value in found.items() if value is not None}
    for name in given:
        if name not in _PLAIN:
            raise UserError(f"a request has no field {shown(name)}: {nearest(name, _PLAIN)}")
    if ("prompt" in given) == ("messages" in given):
        both = "both prompt and messages" if "prompt" in given else "no prompt"
        raise UserError(f"the request has {both}: {_LINE}")
    prompt = read_messages(given["messages"]) if "messages" in given else given["prompt"]
    options = {name: value for name, value in given.items() if name in _OPTIONS}
    if isinstance(biases := options.get("logit_bias"), dict):
        options["logit_bias"] = {_token(name): bias for name, bias in biases.items()}
    return prompt, options


def _token(name: Any) -> Any:
    """A token of an object, whose names JSON writes as text."""
    return int(name) if isinstance(name, str) and re.fullmatch("[0-9]{1,10}", name) else name


def _single(prompt: Any) -> Prompt:
    """A prompt of a right form; a list of a single one is that one."""
    batch, _ = as_batch(prompt)
    if len(batch) > 1:
        raise UserError(f"a request takes one prompt, not {len(batch)}: write a line for each")
    return batch[0]
