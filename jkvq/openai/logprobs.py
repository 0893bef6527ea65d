"""Log probabilities of the tokens of a text, as answers have them."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jkvq.engine.detokenize import LONGEST, UNFINISHED
from jkvq.engine.writer import Scores, Tops
from jkvq.models.tokenizer import Tokenizer
from jkvq.openai.body import Form

_WINDOW = 16  # tokens that are decoded together, at most


@dataclass(frozen=True)
class Echo:
    """The prompt, with which an answer begins: its text, and where its tokens begin in it."""

    text: str = ""
    offsets: Sequence[int] = ()


class Logprobs:
    """Those of one text, asked for in one piece or in several.

    Every token that was drawn is among them, also the one that ended the text.
    """

    def __init__(self, form: Form, tokenizer: Tokenizer, echo: Echo):
        self._form, self._names = form, _names(tokenizer)
        self._echoed = echo.offsets  # until the tokens of the prompt have come, first of all
        self._answered = _Offsets(tokenizer, len(echo.text))

    def next(self, scores: Scores) -> dict[str, Any]:
        """Those of the next tokens."""
        names = [self._names[token] for token in scores.tokens]
        if self._form == "chat":
            tops = scores.tops or [{}] * len(names)
            content = [
                {**_entry(name, logprob), "top_logprobs": self._entries(top)}
                for name, logprob, top in zip(names, scores.logprobs, tops, strict=True)
            ]
            return {"content": content, "refusal": None}
        echoed, self._echoed = self._echoed, ()
        return {
            "tokens": names,
            "token_logprobs": scores.logprobs,
            "top_logprobs": list(map(self._by_name, scores.tops, names, scores.logprobs)) or None,
            "text_offset": [*echoed, *self._answered.next(scores.tokens[len(echoed) :])],
        }

    def _entries(self, top: Tops | None) -> list[dict[str, Any]]:
        return [_entry(self._names[token], logprob) for token, logprob in (top or {}).items()]

    def _by_name(
        self, top: Tops | None, name: str, logprob: float | None
    ) -> dict[str, float | None] | None:
        """The likeliest, with the token itself; of those that look alike the likeliest."""
        if top is None:
            return None
        found: dict[str, float | None] = {}
        for token, other in top.items():
            found.setdefault(self._names[token], other)
        found.setdefault(name, logprob)
        return found


def echo_of(tokenizer: Tokenizer, text: str, tokens: Sequence[int]) -> Echo:
    """A prompt as an answer shows it, which its tokens alone may not: special ones, say."""
    knows = tokenizer.hf.is_fast  # others have no offsets
    encoded = tokenizer.hf(text, return_offsets_mapping=True) if knows else None
    if encoded is None or encoded["input_ids"] != list(tokens):
        return Echo(text, _Offsets(tokenizer, 0).next(tokens))
    offsets, behind = [], 0
    for start, end in encoded["offset_mapping"]:
        # Some leave out the space before a word, and have what they put around a text at 0.
        offsets.append(min(start, behind) if end > start else behind)
        behind = max(behind, end)
    return Echo(text, offsets)


class _Offsets:
    """Where tokens begin in the text that they make; parts of a character where it does."""

    def __init__(self, tokenizer: Tokenizer, start: int):
        self._tokenizer, self._start = tokenizer, start
        self._latest: list[int] = []  # tokens, whose text begins at the start
        self._text = ""

    def next(self, tokens: Sequence[int]) -> list[int]:
        return [self._add(token) for token in tokens]

    def _add(self, token: int) -> int:
        before = self._text
        self._latest.append(token)
        self._text = self._tokenizer.decode(self._latest)
        # What it completes looked like another character, and a further part of that like nothing.
        same = _alike(before, self._text)
        offset = self._start + same - (self._text == before and before.endswith(UNFINISHED))
        if len(self._latest) > _WINDOW:
            end = self._start + len(self._text)
            self._latest = self._latest[-LONGEST:]
            self._text = self._tokenizer.decode(self._latest)
            self._start = end - len(self._text)
        return offset


def _alike(one: str, other: str) -> int:
    """Characters with which both begin."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


class _Names(dict[int, str]):
    """The text of each token alone, and special tokens by their names; kept, once asked for."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        self[token] = str(self._tokenizer.hf.decode([token]))
        return self[token]


_names = functools.lru_cache(2)(_Names)


def _entry(name: str, logprob: float | None) -> dict[str, Any]:
    # Which bytes half a character has is the tokenizer's secret.
    whole = None if UNFINISHED in name else list(name.encode())
    return {"token": name, "logprob": logprob, "bytes": whole}
