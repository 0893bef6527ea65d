"""Log probabilities of the tokens of a text, as answers have them."""

from collections.abc import Sequence
from typing import Any

from jkvq.models.tokenizer import Tokenizer
from jkvq.openai.body import Form

_UNFINISHED = "\ufffd"  # what the bytes of half a character decode to


class Logprobs:
    """Those of one text, asked for in one piece or in several.

    Every token that was drawn is among them, also the one that ended the text.
    """

    def __init__(self, form: Form, tokenizer: Tokenizer):
        self._form, self._tokenizer = form, tokenizer
        self._offset = 0  # characters before the next token

    def next(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        """Those of the next tokens."""
        texts = [self._tokenizer.decode([token]) for token in tokens]
        if self._form == "chat":
            return {"content": list(map(_entry, texts, logprobs)), "refusal": None}
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": list(logprobs),
            "top_logprobs": None,
            "text_offset": offsets,
        }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    # Which bytes half a character has is the tokenizer's secret.
    whole = None if _UNFINISHED in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": whole, "top_logprobs": []}
