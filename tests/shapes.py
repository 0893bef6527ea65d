"""Shapes in signatures, checked whenever a function of jkvq is called in a test."""

import re
from collections.abc import Callable, Iterator
from inspect import isclass
from pathlib import Path
from typing import get_args

from beartype import beartype
from jaxtyping import AbstractArray, install_import_hook

ROOT = Path(__file__).parents[1]
# Folders that are linked into jkvq, and its own
ROOMS = ("models", "calibration", "pallas_kernels", "jkvq/cache", "jkvq/attention", "jkvq/engine")
ROOMS += ("jkvq/evaluation",)


def check_shapes() -> None:
    """Has modules with arrays in their signatures check them, if they are imported after this."""
    install_import_hook(list(_modules()), f"{__name__}.{_checked.__name__}")


def _modules() -> Iterator[str]:
    """Those that import jaxtyping; in others every call would be slowed for nothing."""
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        if "jaxtyping" in path.read_text("utf-8"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(("jkvq", *(part for part in parts if part != "jkvq")))


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
