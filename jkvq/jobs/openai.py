"""Lines of OpenAI's batches: what their bodies ask for, and the objects that answer them."""

import time
from typing import Any, Literal

from jkvq.engine.writer import Generation
from jkvq.jobs.messages import read_messages
from jkvq.support.arguments import shown
from jkvq.support.errors import UserError

Form = Literal["plain", "chat", "completion"]

_FORMS: dict[str, Form] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
_PROMPTS: dict[Form, str] = {"chat": "messages", "completion": "prompt"}
_LIMITS = ("max_completion_tokens", "max_tokens")  # OpenAI's names of max_new_tokens
_SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")
# Fields that do not change the answer, whatever they are
_IGNORED = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "parallel_tool_calls"),
)
# Fields that jkvq does not have, by the values with which they ask for nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
}


def openai_request(line: dict[str, Any]) -> tuple[Form, Any, dict[str, Any]]:
    """Which answer a line asks for, its prompt, and the options that it sets."""
    method, body = line.get("method") or "POST", line.get("body")
    if method != "POST":
        raise UserError(f"method={shown(method)}: POST is the only one")
    if not isinstance(body, dict):
        raise UserError(f"body={shown(body)}: an object with messages or a prompt is needed")
    given = {name: value for name, value in body.items() if value is not None}
    by_prompt = "prompt" in given and "messages" not in given
    url = line.get("url") or f"/v1/{'completions' if by_prompt else 'chat/completions'}"
    if not isinstance(url, str) or url not in _FORMS:
        raise UserError(f"url={shown(url)}: {' or '.join(_FORMS)}")
    form = _FORMS[url]
    part = _PROMPTS[form]
    if part not in given:
        raise UserError(f"the body has no {part}, which {url} needs")
    for name, value in given.items():
        if name not in (part, *_LIMITS, *_SAME, *_IGNORED) and not _asks_nothing(name, value):
            allowed = "".join(f" or give {shown(each)}" for each in _NEUTRAL.get(name, ()))
            raise UserError(
                f"{name}={shown(value)}: jkvq does not have this; leave it out{allowed}"
            )
    options = {"temperature": 1.0, "chat": form == "chat"}  # OpenAI's default is 1
    options |= {name: given[name] for name in _SAME if name in given}
    limits = [given[name] for name in _LIMITS if name in given]
    if limits:
        options["max_new_tokens"] = limits[0]
    return form, read_messages(given[part]) if form == "chat" else given[part], options


def _asks_nothing(name: str, value: Any) -> bool:
    # 0 is not False: logprobs=0 asks for those of the drawn tokens.
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in _NEUTRAL.get(name, ())
    )


def openai_body(form: Form, number: int, model: str, written: Generation) -> dict[str, Any]:
    """The completion object that answers a line."""
    chat = form == "chat"
    content = {"role": "assistant", "content": written.text}
    choice = {
        "index": 0,
        **({"message": content} if chat else {"text": written.text}),
        "logprobs": None,
        "finish_reason": written.finish_reason,
    }
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": written.prompt_tokens,
            "completion_tokens": len(written.tokens),
            "total_tokens": written.prompt_tokens + len(written.tokens),
            "prompt_tokens_details": {"cached_tokens": written.cached_tokens},
        },
    }
