"""Shapes in signatures, checked whenever a function of jkvq is called in a test.

jaxtyping's own import hook wraps every function, and nested ones anew at each call: that took a
sixth of the time of all tests. This one leaves functions without shapes as they are.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from inspect import isclass
from pathlib import Path
from types import ModuleType
from typing import get_args

from beartype import beartype
from jaxtyping import AbstractArray, jaxtyped

ROOT = Path(__file__).parents[1]
# Folders that are linked into jkvq, and its own
ROOMS = ("models", "calibration", "pallas_kernels", "jkvq/cache", "jkvq/attention", "jkvq/engine")
ROOMS += ("jkvq/evaluation",)
_NAME = "_with_shapes_checked"  # of what decorates functions, in their modules


def check_shapes() -> None:
    """Has modules with arrays in their signatures check them, if they are imported after this."""
    sys.meta_path.insert(0, _Finder(set(_modules())))


def _modules() -> Iterator[str]:
    """Those that import jaxtyping."""
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        if "jaxtyping" in path.read_text("utf-8"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(("jkvq", *(part for part in parts if part != "jkvq")))


class _Finder(MetaPathFinder):
    def __init__(self, modules: set[str]):
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self._modules else None
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str):
        """From the source, as what is kept of it has no decorators."""
        path = self.get_filename(fullname)
        tree = _Decorating().visit(ast.parse(self.get_data(path), path))
        return compile(ast.fix_missing_locations(tree), path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, _NAME, checked)
        super().exec_module(module)


class _Decorating(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.decorator_list.append(ast.copy_location(ast.Name(_NAME, ast.Load()), node))
        return node


def checked(function: Callable) -> Callable:
    """The function with its arrays checked; other types are what pyright is for."""
    hints = {name: hint for name, hint in function.__annotations__.items() if _checkable(hint)}
    if not hints:
        return function
    function.__annotations__ = hints
    return jaxtyped(beartype(function), typechecker=None)


def _checkable(hint) -> bool:
    """Whether a hint has shapes, and none such as "H/2" whose H may not be known."""
    shapes = list(_shapes(hint))
    return bool(shapes) and not any(re.search(r"\w[-+*/]", shape) for shape in shapes)


def _shapes(hint) -> Iterator[str]:
    if isclass(hint) and issubclass(hint, AbstractArray):
        yield hint.dim_str
    for part in get_args(hint):
        yield from _shapes(part)
