"""What is meant for the person who typed the input: one kind of error, one of warning."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Input that its author can mend: one sentence with what was given, allowed, and to do.

    The command line prints the sentence and exits with 2; any other exception is a bug of ours and
    keeps its traceback.
    """


class CacheWarning(UserWarning):
    """A cache that is not what its user hopes for: one sentence, and what to take instead.

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
