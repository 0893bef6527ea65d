"""English words, from the lists that RULER takes them from."""

import functools

from jkvq.support.errors import UserError


@functools.cache
def english(*categories: str) -> tuple[str, ...]:
    """Words of these categories (noun, adjective, verb), each once, sorted."""
    try:
        from wonderwords import RandomWord  # noqa: PLC0415 (optional)
    except ImportError:
        raise UserError(
            "RULER's words come from the package wonderwords, which is not installed: "
            "pip install 'jkvq[eval]'"
        ) from None
    return tuple(sorted(RandomWord(enhanced_prefixes=False).filter(include_categories=categories)))
