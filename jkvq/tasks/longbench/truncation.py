"""Prompts that are too long lose their middle, since instructions stand at both ends."""

from jkvq.models.tokenizer import Tokenizer
from jkvq.support.errors import UserError


def without_middle(prompt: str, tokenizer: Tokenizer, room: int, chat: bool) -> str:
    """The prompt if it fits, else the first and the last half of as many tokens as do, as text.

    Halves that are decoded can be more tokens than they were, as where a cut goes through a
    character; they shrink until they fit.

    Args:
        prompt: to be shortened.
        tokenizer: of the model.
        room: tokens that the model may be given.
        chat: count the prompt within the chat template, if there is one.
    """

    def size(text: str) -> int:
        if chat and tokenizer.can_chat:
            return len(tokenizer.encode_chat([{"role": "user", "content": text}]))
        return len(tokenizer.encode(text))

    if size(prompt) <= room:
        return prompt
    tokens = tokenizer.encode(prompt)
    template = size("") - len(tokenizer.encode(""))
    for half in range((room - template) // 2, 0, -1):
        shorter = tokenizer.decode(tokens[:half]) + tokenizer.decode(tokens[-half:])
        if size(shorter) <= room:
            return shorter
    raise UserError(
        f"beside an answer of LongBench the context has room for {max(room, 0)} tokens, too few "
        "for a prompt: take a model with a longer context"
    )
