"""Texts as a model reads them: from a file to tokens that begin as a prompt does."""

import gzip
import zlib
from pathlib import Path

from jkvq.models.tokenizer import Tokenizer
from jkvq.support.errors import UserError


def read_text(path: Path) -> str:
    """The text of a file, unpacked if it ends in .gz."""
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text: {error}") from None


def leading_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens that the tokenizer puts before every text: BOS, or none."""
    plain = list(tokenizer.hf.encode("a", add_special_tokens=False))
    whole = tokenizer.encode("a")
    places = range(len(whole) - len(plain) + 1)
    return whole[: next(i for i in places if whole[i : i + len(plain)] == plain)]


def text_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """All tokens of a text, which begins as a prompt does."""
    return leading_tokens(tokenizer) + list(tokenizer.hf.encode(text, add_special_tokens=False))


def first_tokens(tokenizer: Tokenizer, text: str, count: int) -> list[int]:
    """The first ``count`` tokens of a text, which begins as a prompt does.

    ``leading_tokens`` count among them.
    """
    return first_of(text_tokens(tokenizer, text), count)


def first_of(tokens: list[int], count: int) -> list[int]:
    """The first ``count`` of a text's tokens; refuses a text that has fewer."""
    if len(tokens) < count:
        raise UserError(
            f"{count} tokens were asked for and the text has {len(tokens)}: ask for fewer, or give "
            "a longer text"
        )
    return tokens[:count]
