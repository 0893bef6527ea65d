"""The objects that answer a request: a whole one, or chunks of it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jkvq.engine.writer import FinishReason, Generation
from jkvq.openai.body import Form
from jkvq.openai.calls import Said

_KINDS: dict[Form, tuple[str, str]] = {
    "chat": ("chat.completion", "chat.completion.chunk"),
    "completion": ("text_completion", "text_completion"),
}
_IDENTITIES: dict[Form, str] = {"chat": "chatcmpl", "completion": "cmpl"}


@dataclass(frozen=True)
class Reply:
    """What all objects that answer one request share.

    form: as the request asks for it.
    identity: of the request, among all others.
    model: as the answer calls it.
    created: in seconds since 1970.
    """

    form: Form
    identity: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(
        self,
        written: Sequence[Generation],
        n: int = 1,
        logprobs: Sequence[Any] | None = None,
        said: Sequence[Said] | None = None,
    ) -> dict[str, Any]:
        """The answer to prompts with ``n`` texts each, which stand beside each other.

        said: what each text comes to; by default itself.
        """
        said = said or [Said(each.text) for each in written]
        choices = [
            {
                "index": index,
                **self._said("message", each, {"role": "assistant"}),
                "logprobs": logprobs[index] if logprobs else None,
                "finish_reason": _reason(written[index].finish_reason, each),
            }
            for index, each in enumerate(said)
        ]
        return {**self._head(0), "choices": choices, "usage": usage(written, n)}

    def chunk(
        self,
        index: int,
        said: Said,
        finish_reason: FinishReason | None,
        *,
        first: bool,
        logprobs: Any = None,
    ) -> dict[str, Any]:
        """What is new of one text; its ``first`` chunk says who speaks."""
        choice = {
            "index": index,
            **self._said("delta", said, {"role": "assistant"} if first else {}),
            "logprobs": logprobs,
            "finish_reason": finish_reason and _reason(finish_reason, said),
        }
        return {**self._head(1), "choices": [choice]}

    def usage_chunk(self, written: Sequence[Generation], n: int) -> dict[str, Any]:
        """The last chunk, for those who ask for it."""
        return {**self._head(1), "choices": [], "usage": usage(written, n)}

    def _head(self, part: int) -> dict[str, Any]:
        return {
            "id": f"{_IDENTITIES[self.form]}-{self.identity}",
            "object": _KINDS[self.form][part],
            "created": self.created,
            "model": self.model,
        }

    def _said(self, name: str, said: Said, speaker: dict[str, str]) -> dict[str, Any]:
        """The text where this form has it, and calls."""
        if self.form == "completion":
            return {"text": said.content}
        if not said.calls:
            return {name: {**speaker, "content": said.content}}
        return {name: {**speaker, "content": said.content or None, "tool_calls": said.calls}}


def _reason(reason: FinishReason, said: Said) -> str:
    return "tool_calls" if said.called and reason == "stop" else reason


def usage(written: Sequence[Generation], n: int = 1) -> dict[str, Any]:
    """Tokens read and drawn for prompts with ``n`` texts each; a prompt counts once."""
    prompts = written[::n]
    read, drawn = sum(each.prompt_tokens for each in prompts), sum(len(w.tokens) for w in written)
    return {
        "prompt_tokens": read,
        "completion_tokens": drawn,
        "total_tokens": read + drawn,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in prompts)},
    }
