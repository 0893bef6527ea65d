"""Log probabilities of the tokens of a text, as answers have them."""

from typing import Any

from jkvq.engine.writer import Scores, Tops
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

    def next(self, scores: Scores) -> dict[str, Any]:
        """Those of the next tokens."""
        texts = list(map(self._text, scores.tokens))
        tops = scores.tops or [{}] * len(texts)
        if self._form == "chat":
            content = [
                {**_entry(text, logprob), "top_logprobs": self._entries(top)}
                for text, logprob, top in zip(texts, scores.logprobs, tops, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": scores.logprobs,
            "top_logprobs": list(map(self._by_text, scores.tops, texts, scores.logprobs)) or None,
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token])

    def _entries(self, top: Tops | None) -> list[dict[str, Any]]:
        return [_entry(self._text(token), logprob) for token, logprob in (top or {}).items()]

    def _by_text(
        self, top: Tops | None, text: str, logprob: float | None
    ) -> dict[str, float | None] | None:
        """The likeliest, with the token itself; of those that look alike the likeliest."""
        if top is None:
            return None
        found: dict[str, float | None] = {}
        for token, other in top.items():
            found.setdefault(self._text(token), other)
        found.setdefault(text, logprob)
        return found


def _entry(text: str, logprob: float | None) -> dict[str, Any]:
    # Which bytes half a character has is the tokenizer's secret.
    whole = None if _UNFINISHED in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": whole}
