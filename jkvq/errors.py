"""The one kind of error that is meant for the person who typed the input."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Input that its author can mend: one sentence with what was given, allowed, and to do.

    The command line prints the sentence and exits with 2; any other exception is a bug of ours and
    keeps its traceback.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the closest known ones, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}."
