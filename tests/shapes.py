"""Shapes in signatures, checked whenever a function of jkvq is called in a test."""

import re
from collections.abc import Callable, Iterator
from inspect import isclass
from typing import get_args

from beartype import beartype
from jaxtyping import AbstractArray, install_import_hook

ROOMS = ["pallas_kernels", "models", "cache", "attention", "calibration", "engine", "evaluation"]


def check_shapes() -> None:
    """Has the rooms with arrays in their signatures check them, if they are imported after this."""
    install_import_hook([f"jkvq.{room}" for room in ROOMS], f"{__name__}.{_checked.__name__}")


def _checked(function: Callable) -> Callable:
    """The function with its arrays checked; other types are what pyright is for.

    Dataclasses are left alone: trees of them hold other things than arrays while JAX maps them.
    """
    if function.__name__ != "__init__":
        hints = function.__annotations__.items()
        function.__annotations__ = {name: hint for name, hint in hints if _checkable(hint)}
        function = beartype(function)
    return function


def _checkable(hint) -> bool:
    """Whether a hint has shapes, and none such as "H/2" whose H may not be known."""
    shapes = list(_shapes(hint))
    return bool(shapes) and not any(re.search(r"\w[-+*/]", shape) for shape in shapes)


def _shapes(hint) -> Iterator[str]:
    if isclass(hint) and issubclass(hint, AbstractArray):
        yield hint.dim_str
    for part in get_args(hint):
        yield from _shapes(part)
