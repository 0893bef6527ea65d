"""Lines of OpenAI's batches: a request's body, and where it would be sent."""

from typing import Any

from jkvq.openai.body import URLS, Form, read_body
from jkvq.support.arguments import shown
from jkvq.support.errors import UserError

_FORMS: dict[str, Form] = {url: form for form, url in URLS.items()}


def openai_request(line: dict[str, Any]) -> tuple[Form, Any, dict[str, Any]]:
    """Which answer a line asks for, its prompt, and the options that it sets."""
    method, body = line.get("method") or "POST", line.get("body")
    if method != "POST":
        raise UserError(f"method={shown(method)}: POST is the only one")
    if not isinstance(body, dict):
        raise UserError(f"body={shown(body)}: an object with messages or a prompt is needed")
    by_prompt = body.get("prompt") is not None and body.get("messages") is None
    url = line.get("url") or URLS["completion" if by_prompt else "chat"]
    if not isinstance(url, str) or url not in _FORMS:
        raise UserError(f"url={shown(url)}: {' or '.join(_FORMS)}")
    return _FORMS[url], *read_body(_FORMS[url], body)
