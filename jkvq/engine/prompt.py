"""What may be a prompt, and its tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import numpy as np
from jinja2 import TemplateError

from jkvq.llm import LLM
from jkvq.models.model import Model
from jkvq.models.tokenizer import Message
from jkvq.support.arguments import shown
from jkvq.support.errors import UserError

# Text, a conversation, or tokens.
Prompt = str | Sequence[Message] | Sequence[int]
_ALLOWED = "give text, a list of messages with role and content, or a list of tokens"
_Bytes = bytes | bytearray | memoryview


class PromptTooLong(UserError):
    """A prompt that the model's context has no room for."""


def as_batch(prompts) -> tuple[list[Prompt], bool]:
    """The prompts as a list, each of a right form, and whether they were a single one."""
    single = isinstance(prompts, str) or _is_conversation(prompts) or _is_tokens(prompts)
    if not single and not _is_listed(prompts):
        raise _no_prompt(prompts, "; or a list of these")
    batch = [prompts] if single else list(prompts)
    if not batch:
        raise UserError("the list of prompts is empty: give at least one")
    for prompt in batch:
        _require_form(prompt)
    return batch, single


def encode_prompt(
    llm: LLM | Model,
    prompt: Prompt,
    chat: bool | None,
    answer_start: str = "",
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """Tokens of a prompt from `as_batch`: at least one and fewer than the model's context.

    chat: wrap text in the chat template; None does so if the model has one.
    answer_start: text behind the prompt, with which the answer begins.
    tools: functions that a conversation may call.
    """
    tokens = prompt_tokens(llm, prompt, chat, answer_start, tools)
    if not tokens:
        raise UserError(
            f"the prompt {shown(prompt)} has 0 tokens in this model's vocabulary: give other text, "
            "or a tokenizer that has its characters"
        )
    if len(tokens) >= llm.config.context:
        raise PromptTooLong(
            f"the prompt has {len(tokens)} tokens and the model's context is {llm.config.context}, "
            "of which at least one is for the answer; shorten the prompt"
        )
    return tokens


def prompt_tokens(
    llm: LLM | Model,
    prompt: Prompt,
    chat: bool | None,
    answer_start: str = "",
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """The same, however many they are."""
    if isinstance(prompt, str):
        if llm.tokenizer.can_chat if chat is None else chat:
            return _encode_chat(llm, [{"role": "user", "content": prompt}], answer_start)
        return llm.tokenizer.encode(prompt + answer_start)
    if _is_conversation(prompt):
        return _encode_chat(llm, prompt, answer_start, tools)
    assert _is_tokens(prompt)
    if answer_start:
        raise UserError(
            "answer_start goes with text and conversations; put its tokens behind the prompt's"
        )
    return _checked_tokens(prompt, llm.config.vocab)


@contextmanager
def strangers_prompt() -> Iterator[None]:
    """Encodes a prompt among those of others, whom its errors must not stop.

    Whatever the tokenizer or the chat template raises is a `UserError` of this prompt alone.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"the prompt cannot be turned into tokens: {error}") from None


def _require_form(prompt) -> None:
    """Refuses what is no prompt for any model."""
    if not isinstance(prompt, str) and not _is_listed(prompt):
        raise _no_prompt(prompt)
    if len(prompt) == 0:
        raise UserError("the prompt is empty: give at least one word")
    if isinstance(prompt, str):
        _require_unicode(prompt)
    elif _is_conversation(prompt):
        for message in prompt:
            if not all(isinstance(message.get(part), str) for part in ("role", "content")):
                raise UserError(
                    f"{shown(message)} is no message: role and content are needed, both text"
                )
            _require_unicode(message["content"])
    elif not _is_tokens(prompt):
        raise _no_prompt(prompt)


def _is_listed(value) -> bool:
    """Whether a value is a list of something; bytes are not, though Python has them as numbers."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | _Bytes)


def _is_conversation(prompt) -> TypeGuard[Sequence[Message]]:
    return _is_listed(prompt) and len(prompt) > 0 and all(isinstance(x, dict) for x in prompt)


def _is_tokens(prompt) -> TypeGuard[Sequence[int]]:
    return (
        _is_listed(prompt)
        and len(prompt) > 0
        and all(isinstance(x, int | np.integer) and not isinstance(x, bool) for x in prompt)
    )


def _no_prompt(value: object, more: str = "") -> UserError:
    decode = "; decode bytes first" if isinstance(value, _Bytes) else ""
    return UserError(f"{shown(value)} is no prompt: {_ALLOWED}{more}{decode}")


def _require_unicode(text: str) -> None:
    """Refuses bytes that are no UTF-8, which reach Python as halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the prompt is no valid Unicode at character {error.start}: give UTF-8 text"
        ) from None


def _encode_chat(
    llm: LLM | Model,
    messages: Sequence[Message],
    answer_start: str,
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    try:
        return llm.tokenizer.encode_chat(messages, answer_start, tools)
    except TemplateError as error:  # such as roles that do not alternate
        raise UserError(f"the model's chat template refuses these messages: {error}") from None


def _checked_tokens(prompt: Sequence[int], vocab: int) -> list[int]:
    tokens = [int(token) for token in prompt]
    for token in tokens:
        if not 0 <= token < vocab:
            raise UserError(f"token {token} is outside the vocabulary of {vocab} tokens")
    return tokens
