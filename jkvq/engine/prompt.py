"""What may be a prompt, and its tokens."""

import textwrap
from collections.abc import Sequence
from typing import TypeGuard

import numpy as np

from jkvq.llm import LLM
from jkvq.models.model import Model
from jkvq.models.tokenizer import Message
from jkvq.support.errors import UserError

# Text, a conversation, or tokens.
Prompt = str | Sequence[Message] | Sequence[int]
_ALLOWED = "give text, a list of messages with role and content, or a list of tokens"


def encode_prompt(llm: LLM | Model, prompt: Prompt, chat: bool | None) -> list[int]:
    """Tokens of a prompt, at least one and fewer than the model's context.

    chat: wrap text in the chat template; None does so if the model has one.
    """
    if not isinstance(prompt, Sequence | np.ndarray):
        raise UserError(f"{_shown(prompt)} is no prompt: {_ALLOWED}")
    if len(prompt) == 0:
        raise UserError("the prompt is empty: give at least one word")
    if isinstance(prompt, str):
        if llm.tokenizer.can_chat if chat is None else chat:
            tokens = llm.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        else:
            tokens = llm.tokenizer.encode(prompt)
    elif _is_conversation(prompt):
        tokens = llm.tokenizer.encode_chat(_checked(prompt))
    elif _is_tokens(prompt):
        tokens = [int(token) for token in prompt]
        outside = [token for token in tokens if not 0 <= token < llm.config.vocab]
        if outside:
            raise UserError(
                f"token {outside[0]} is outside the vocabulary of {llm.config.vocab} tokens"
            )
    else:
        raise UserError(f"{_shown(prompt)} is no prompt: {_ALLOWED}")
    if len(tokens) >= llm.config.context:
        raise UserError(
            f"the prompt has {len(tokens)} tokens and the model's context is {llm.config.context}, "
            "of which at least one is for the answer; shorten the prompt"
        )
    return tokens


def as_batch(prompts) -> tuple[list[Prompt], bool]:
    """The prompts as a list, and whether they were a single one."""
    if not isinstance(prompts, Sequence | np.ndarray):
        raise UserError(f"{_shown(prompts)} is no prompt: {_ALLOWED}; or a list of these")
    if isinstance(prompts, str) or _is_conversation(prompts) or _is_tokens(prompts):
        return [prompts], True
    prompts = list(prompts)
    if not prompts:
        raise UserError("the list of prompts is empty: give at least one")
    return prompts, False


def _is_conversation(prompt) -> TypeGuard[Sequence[Message]]:
    return len(prompt) > 0 and all(isinstance(message, dict) for message in prompt)


def _checked(messages: Sequence[Message]) -> Sequence[Message]:
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise UserError(f"{_shown(message)} is no message: role and content are needed")
    return messages


def _shown(value: object) -> str:
    return textwrap.shorten(repr(value), 80)


def _is_tokens(prompt) -> TypeGuard[Sequence[int]]:
    return len(prompt) > 0 and all(isinstance(token, int | np.integer) for token in prompt)
