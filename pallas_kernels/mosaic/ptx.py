"""PTX in the middle of a kernel."""

import inspect
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

_LETTERS = {"i1": "b", "i16": "h", "i32": "r", "i64": "l", "f32": "f"}  # of registers

# Whether instructions that a warp runs together are known as such: without that, a compiler may
# move them to where some threads do not come.
KEEPS_TOGETHER = "convergent" in inspect.signature(llvm.inline_asm).parameters


def ptx(
    text: str, *args: Any, gives: Any = None, acts: bool = False, together: bool = False
) -> Any:
    """Instructions; $0, $1 ... are what they give, then their arguments.

    Args:
        text: of the instructions.
        args: their arguments.
        gives: the type of their result, or a list of types for several.
        acts: whether they do more than give a result; always without one.
        together: whether all threads of a warp must run them at the same time.
    """
    several = isinstance(gives, Sequence)
    types = list(gives) if several else [] if gives is None else [gives]
    whole = types[0] if len(types) == 1 else None
    if whole is None:
        whole = llvm.StructType.get_literal(types) if types else ir.Type.parse("!llvm.void")
    letters = [f"={_LETTERS[str(kind)]}" for kind in types]
    letters += [_LETTERS[str(arg.type)] for arg in args]
    how: dict[str, Any] = {"has_side_effects": acts or not types}
    if together and KEEPS_TOGETHER:
        how["convergent"] = True
    result: Any = llvm.inline_asm(whole, list(args), text, ",".join(letters), **how)
    if not several:
        return result if types else None
    if len(types) == 1:
        return [result]
    return [llvm.extractvalue(kind, result, [i]) for i, kind in enumerate(types)]
