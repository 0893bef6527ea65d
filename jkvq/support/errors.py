"""Errors and warnings for the person who typed the input; their text is shown as it is."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Input that its author can mend: one sentence on what was given, what is allowed, what to do.

    The command line prints the sentence and exits with 2; any other exception is a bug of ours and
    keeps its traceback.
    """


class CacheWarning(UserWarning):
    """A cache that breaks its model, or is not the one expected: one sentence that names another.

    The command line prints the sentence.
    """


def nearest(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """The end of a sentence about an unknown name: the known names closest to it.

    Where none is close it is ``otherwise``, or all known names.
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return otherwise or f"known: {', '.join(known)}."
