"""Reading the fields of a config.json or of GGUF metadata: what is there must make sense."""

import math
from collections.abc import Mapping
from typing import Any

from jkvq.support.errors import UserError

Fields = Mapping[str, Any]


def count(fields: Fields, name: str, default: int | None = None) -> int:
    """A field that says how many."""
    value = given(fields, name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name}={value!r}: a model needs a whole number from 1 on; fetch it again")
    return value


def positive(fields: Fields, name: str, default: float | None = None) -> float:
    """A field that holds a number above 0."""
    value = given(fields, name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UserError(f"{name}={value!r}: a model needs a positive number; fetch it again")
    return value


def given(fields: Fields, name: str, default: Any) -> Any:
    """A field's value; null is as if it were not there."""
    value = default if fields.get(name) is None else fields[name]
    if value is None:
        raise KeyError(name)
    return value
