"""The few PTX instructions of the kernels' inline assembly, on numpy arrays of 32-bit registers.

Interpreted kernels take other bodies than those that a GPU runs; this runs the latter without one.
"""

import functools
from collections.abc import Callable

import numpy as np

Register = np.ndarray  # uint32, one number for each thread


def elementwise_inline_asm(asm: str, *, args, constraints: str, pack: int, result_shape_dtypes):
    """As ``jax.experimental.pallas.triton.elementwise_inline_asm``, for one result."""
    (result,) = result_shape_dtypes
    given = [np.ascontiguousarray(arg) for arg in args]
    kind = constraints[1]  # "=r,r,r" or "=f,f,f": the result, then what is given
    assert constraints == ",".join([f"={kind}"] + [kind] * len(given))
    assert {arg.shape for arg in given} == {result.shape}
    assert {x.dtype.itemsize * pack for x in (result, *given)} == {4}
    registers = {f"${i + 1}": arg.reshape(-1).view(np.uint32) for i, arg in enumerate(given)}
    for line in asm.strip().removeprefix("{").removesuffix("}").split(";"):
        if line.strip() and not line.strip().startswith(".reg"):
            _step(line, registers)
    return [registers["$0"].view(result.dtype).reshape(result.shape)]


def _step(line: str, registers: dict[str, Register]):
    """Runs ``name to, from, from, ...``."""
    name, operands = line.strip().split(maxsplit=1)
    to, *sources = (operand.strip() for operand in operands.split(","))
    values = [registers[x] if x in registers else _immediate(x) for x in sources]
    shape = registers["$1"].shape
    registers[to] = np.broadcast_to(_INSTRUCTIONS[name](*values), shape).astype(np.uint32)


def _immediate(text: str) -> Register:
    """A number as the assembler reads it: 0f and eight hexadecimal digits are a float's bits."""
    return np.array(int(text[2:], 16) if text.startswith("0f") else int(text, 0), np.uint32)


def _shift(by: Callable) -> Callable:
    """What is shifted by 32 and more is gone."""
    return lambda x, count: np.where(count < 32, by(x, np.minimum(count, 31)), 0)


def _lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    """Any function of three bits: bit 4a + 2b + c of the table."""
    found = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for bit in range(8):
        if table >> bit & 1:
            found |= (a if bit & 4 else ~a) & (b if bit & 2 else ~b) & (c if bit & 1 else ~c)
    return found


def _prmt(a: Register, b: Register, selector: Register) -> Register:
    """Four bytes out of the eight of b and a, by the selector's hexadecimal digits."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    picked = [
        both >> np.uint64(8 * (int(selector) >> 4 * i & 7)) & np.uint64(255) for i in range(4)
    ]
    assert not int(selector) & 0x8888, "sign bytes are not emulated"
    return functools.reduce(np.bitwise_or, [b << np.uint64(8 * i) for i, b in enumerate(picked)])


def _on_floats(function: Callable, floats: type) -> Callable:
    """In float64, which holds products whole, and rounded once; two floats a register if narrow."""

    def run(*operands: Register) -> Register:
        shape = np.broadcast_shapes(*(x.shape for x in operands))
        each = [np.broadcast_to(x, shape).copy().view(floats).astype(np.float64) for x in operands]
        return function(*each).astype(floats).view(np.uint32)

    return run


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return a * b + c


def _saturated(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.clip(np.nan_to_num(_fma(a, b, c), nan=0.0), 0, 1)


_INSTRUCTIONS: dict[str, Callable[..., Register]] = {
    "mov.b32": lambda x: x,
    "and.b32": np.bitwise_and,
    "shr.b32": _shift(np.right_shift),
    "shl.b32": _shift(np.left_shift),
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "add.f16x2": _on_floats(np.add, np.float16),
    "mul.f16x2": _on_floats(np.multiply, np.float16),
    "fma.rn.f16x2": _on_floats(_fma, np.float16),
    "sub.f32": _on_floats(np.subtract, np.float32),
    "fma.rn.f32": _on_floats(_fma, np.float32),
    "fma.rn.sat.f32": _on_floats(_saturated, np.float32),
}
