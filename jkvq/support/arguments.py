"""Checks of what a caller passes: types and ranges, each refused with one sentence.

NumPy's scalars count as Python's, and become them.
"""

import textwrap
from typing import Any

import numpy as np

from jkvq.support.errors import UserError

_MOST_SHOWN = 400  # characters that are looked at to show a value; there may be a million
INT32 = 2**31 - 1  # the largest number that compiled programs count with


def whole(name: str, value: Any, least: int, most: int, allowed: str) -> int:
    """A whole number from ``least`` to ``most``, in words ``allowed``; no bool is one."""
    right = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not right or not least <= int(value) <= most:
        raise refusal(name, value, allowed)
    return int(value)


def number(name: str, value: Any, least: float, most: float, allowed: str) -> float:
    """A number from ``least`` to ``most``; NaN is none."""
    right = isinstance(value, int | float | np.integer | np.floating)
    if not right or isinstance(value, bool) or not least <= value <= most:
        raise refusal(name, value, allowed)
    return float(value)


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool | np.bool_):
        raise refusal(name, value, "True or False")
    return bool(value)


def refusal(name: str, value: Any, allowed: str) -> UserError:
    """The error that says what was given and what is allowed."""
    plain = value.item() if isinstance(value, np.generic) else value
    return UserError(f"{name}={shown(plain)}: {allowed}")


def shown(value: object) -> str:
    """A value as Python writes it, cut to what fits into a sentence."""
    return textwrap.shorten(repr(value)[:_MOST_SHOWN], 80)
