"""Texts that follow a grammar: which tokens may come next, by llguidance."""

import functools
import json
import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from jkvq.models.tokenizer import Tokenizer
from jkvq.support.errors import UserError

# One space behind commas and colons, and no other: free space is where small models never end.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FOLLOWED = 256  # tokens at most: nothing else runs in this process meanwhile
_KEPT = 64  # grammars that need not be compiled again


class Matcher:
    """Where a text stands in its grammar."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, grammar: str):
        self._found = _compiled(tokenizer, vocab, grammar).deep_copy()
        self._words = words(vocab)

    def allowed(self) -> Int[np.ndarray, " W"]:
        """A bit for each token that may come next."""
        return np.frombuffer(self._found.compute_bitmask(), np.int32)[: self._words]

    def take(self, token: int) -> bool:
        """Goes on by a token; returns whether the text is complete."""
        self._found.consume_token(token)
        stopped = self._found.is_stopped()
        if self._found.is_error():
            raise ValueError(_sentence(self._found.get_error()))
        return stopped


def words(vocab: int) -> int:
    """Words of 32 bits that have a bit for each token."""
    return -(-vocab // 32)


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON that a schema allows, on one line."""
    library = _library()
    try:
        return library.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_STYLE)
    except (ValueError, RecursionError) as error:
        raise _unusable(str(error)) from None


def require_grammar(tokenizer: Tokenizer, vocab: int, grammar: str) -> None:
    """Refuses what is no grammar, or none for this tokenizer; the same one is kept for later."""
    _compiled(tokenizer, vocab, grammar)


@functools.lru_cache(_KEPT)
def _compiled(tokenizer: Tokenizer, vocab: int, grammar: str) -> Any:
    library = _library()
    found = library.LLMatcher(_tokens(tokenizer, vocab), grammar, log_level=0)
    if found.is_error():
        raise _unusable(found.get_error())
    beginning = found.deep_copy()
    _follow(beginning)
    if beginning.is_error():
        raise _unusable(f"no text follows it to its end: {beginning.get_error()}")
    return found


def _follow(text: Any) -> None:
    """Goes on until there is a choice; where a rule needs itself first this ends in an error."""
    left = _FOLLOWED
    text.compute_bitmask()
    while left and not text.is_error() and (forced := text.compute_ff_tokens()[:left]):
        text.consume_tokens(forced)
        left -= len(forced)
        text.compute_bitmask()


@functools.lru_cache(2)
def _tokens(tokenizer: Tokenizer, vocab: int) -> Any:
    """The vocabulary as llguidance has it; takes a second."""
    _library()
    from llguidance.hf import from_tokenizer  # noqa: PLC0415

    try:
        return from_tokenizer(tokenizer.hf, n_vocab=vocab, eos_token=sorted(tokenizer.stop_tokens))
    except Exception as error:
        raise UserError(
            f"llguidance cannot read this model's tokenizer, so no grammar can be asked for: "
            f"{_sentence(str(error))}"
        ) from None


def _library() -> Any:
    try:
        import llguidance  # noqa: PLC0415 (not everyone has it)
    except ImportError:
        raise UserError('a grammar or schema needs llguidance: pip install "jkvq[serve]"') from None
    return llguidance


def _unusable(error: str) -> UserError:
    return UserError(f"the grammar or schema cannot be used: {_sentence(error)}")


def _sentence(error: str) -> str:
    """An error of llguidance without the state that it has behind it."""
    return textwrap.shorten(error.partition("<state>")[0], 300)
