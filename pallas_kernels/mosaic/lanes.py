"""Instructions of a warp: a value here is one register in each of its 32 threads.

The arithmetic of the kernels is written against this class, so that tests can run the very same
arithmetic with numpy in its place.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from jkvq.pallas_kernels.mosaic.ptx import ptx

Value = Any  # of MLIR, or of numpy in tests
_ALL = "0xffffffff"  # threads of a warp


class Lanes:
    """Integers are of 32 bits without a sign, unless a name says so; floats are of 32 bits."""

    def __init__(self):
        self.int, self.long = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        self.float = ir.F32Type.get()

    # Numbers

    def i(self, number: int) -> Value:
        number &= 0xFFFFFFFF
        return utils.c(number - (1 << 32) if number >= 1 << 31 else number, self.int)

    def f(self, number: float) -> Value:
        return utils.c(float(number), self.float)

    def add(self, a, b):
        return arith.addi(a, b)

    def sub(self, a, b):
        return arith.subi(a, b)

    def mul(self, a, b):
        return arith.muli(a, b)

    def div(self, a, b):
        return arith.divui(a, b)

    def rem(self, a, b):
        return arith.remui(a, b)

    def min(self, a, b):
        """With a sign."""
        return arith.minsi(a, b)

    def max(self, a, b):
        """With a sign."""
        return arith.maxsi(a, b)

    def and_(self, a, b):
        return arith.andi(a, b)

    def or_(self, a, b):
        return arith.ori(a, b)

    def xor(self, a, b):
        return arith.xori(a, b)

    def shl(self, a, by: int):
        return arith.shli(a, self.i(by)) if by else a

    def shr(self, a, by: int):
        return arith.shrui(a, self.i(by)) if by else a

    def shl_by(self, a, by):
        return arith.shli(a, by)

    def shr_by(self, a, by):
        return arith.shrui(a, by)

    def signed_shr(self, a, by):
        return arith.shrsi(a, by)

    def eq(self, a, b):
        return arith.cmpi(arith.CmpIPredicate.eq, a, b)

    def lt(self, a, b):
        """With a sign."""
        return arith.cmpi(arith.CmpIPredicate.slt, a, b)

    def select(self, condition, a, b):
        return arith.select(condition, a, b)

    def fadd(self, a, b):
        return arith.addf(a, b)

    def fsub(self, a, b):
        return arith.subf(a, b)

    def fmul(self, a, b):
        return arith.mulf(a, b)

    def ffma(self, a, b, c):
        """a b + c."""
        return self._floats("fma.rn.f32 $0, $1, $2, $3;", a, b, c)

    def fmax(self, a, b):
        return self._floats("max.f32 $0, $1, $2;", a, b)

    def fabs(self, a):
        return self._floats("abs.f32 $0, $1;", a)

    def rcp(self, a):
        return self._floats("rcp.approx.ftz.f32 $0, $1;", a)

    def exp2(self, a):
        return self._floats("ex2.approx.ftz.f32 $0, $1;", a)

    def log2(self, a):
        return self._floats("lg2.approx.ftz.f32 $0, $1;", a)

    def to_float(self, a):
        """Of an integer with a sign."""
        return self._floats("cvt.rn.f32.s32 $0, $1;", a)

    def to_int(self, a):
        """The nearest, with a sign."""
        return self._ints("cvt.rni.s32.f32 $0, $1;", a)

    def as_float(self, a):
        """The float of the same bits."""
        return arith.bitcast(self.float, a)

    def as_int(self, a):
        """The integer of the same bits."""
        return arith.bitcast(self.int, a)

    def short(self, a, kind: str):
        """A float rounded to f16 or bf16: its 16 bits, with zeros above them."""
        text = f"{{ .reg .b16 h; cvt.rn.{kind}.f32 h, $1; cvt.u32.u16 $0, h; }}"
        return self._ints(text, a)

    def from_short(self, a, kind: str):
        """The float of 16 bits."""
        if kind == "bf16":
            return self.as_float(self.shl(a, 16))
        text = "{ .reg .b16 h, z; mov.b32 {h, z}, $1; cvt.f32.f16 $0, h; }"
        return self._floats(text, a)

    def bytes_of(self, a, b, selector):
        """Four of the eight bytes of a and b: nibble i of the selector says which is byte i.

        Only its lower 16 bits count. Nibbles of 8 and more give the sign of a byte: 0 or 0xFF.
        """
        return self._ints("prmt.b32 $0, $1, $2, $3;", a, b, selector)

    def halves_mul(self, a, b):
        """Products of two floats of 16 bits in each register."""
        return self._ints("mul.rn.f16x2 $0, $1, $2;", a, b)

    def halves_fma(self, a, b, c):
        """a b + c of two floats of 16 bits in each register."""
        return self._ints("fma.rn.f16x2 $0, $1, $2, $3;", a, b, c)

    # Between threads

    def swap(self, a, distance: int):
        """The float of the thread whose number differs in this bit."""
        return self._shuffle(f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, {_ALL};", a)

    def take(self, a, thread):
        """The float of that thread."""
        return self._shuffle(f"shfl.sync.idx.b32 $0, $1, $2, 31, {_ALL};", a, thread)

    def _shuffle(self, text: str, a, *more):
        return self.as_float(self.together(text, self.as_int(a), *more))

    def any_above(self, a, bound):
        """Whether a float of any thread is above that."""
        text = f"""{{ .reg .pred p; setp.gt.f32 p, $1, $2; vote.sync.any.pred p, p, {_ALL};
            selp.b32 $0, 1, 0, p; }}"""
        return arith.cmpi(arith.CmpIPredicate.ne, self.together(text, a, bound), self.i(0))

    def transpose(self, a):
        """An 8 x 8 matrix of 16-bit numbers, two in each thread, row by row."""
        return self.together("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", a)

    def multiply_bytes(self, total: Sequence[Value], a: Sequence[Value], b: Sequence[Value], kind):
        """total + A B: 16 x 32 bytes by 32 x 8; kind is u8.s8 or u8.u8."""
        return self._multiply(f"mma.sync.aligned.m16n8k32.row.col.s32.{kind}.s32", total, a, b)

    def multiply_floats(self, total: Sequence[Value], a: Sequence[Value], b: Sequence[Value], kind):
        """total + A B: 16 x 16 floats by 16 x 8; kind is f16 or bf16, the sum in float32."""
        name = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        return self._multiply(name, total, a, b, self.float)

    def _multiply(self, name: str, total, a, b, result=None):
        text = f"{name} {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}};"
        types = [result or self.int] * 4
        return ptx(text, *a, *b, *total, gives=types, together=True)

    def together(self, text: str, *args):
        """An integer by an instruction that all threads run at the same time."""
        return ptx(text, *args, gives=self.int, acts=True, together=True)

    # Memory

    def load_shared(self, address, offset: int, count: int) -> list[Value]:
        """1, 2 or 4 integers in a row."""
        kind = {1: "b32", 2: "v2.b32", 4: "v4.b32"}[count]
        text = f"ld.shared.{kind} {_registers(0, count)}, [${count}+{offset}];"
        return ptx(text, address, gives=[self.int] * count, acts=True)

    def load_shared_half(self, address, offset: int):
        """16 bits."""
        text = f"{{ .reg .b16 h; ld.shared.b16 h, [$1+{offset}]; cvt.u32.u16 $0, h; }}"
        return ptx(text, address, gives=self.int, acts=True)

    def global_pointer(self, ref):
        return llvm.ptrtoint(self.long, utils.memref_ptr(ref))

    def shared_pointer(self, ref):
        return llvm.ptrtoint(self.int, utils.memref_ptr(ref))

    def at(self, pointer, index, size: int = 1):
        """The address of an element, by its index without a sign."""
        text = "mad.wide.u32 $0, $1, $2, $3;"
        return ptx(text, index, self.i(size), pointer, gives=self.long)

    def load(self, pointer, index):
        """An integer that nobody writes while the kernel runs."""
        return self._ints("ld.global.nc.b32 $0, [$1];", self.at(pointer, index, 4))

    def load_row(self, pointer, index, count: int) -> list[Value]:
        """So many integers in a row, a multiple of 4, that nobody writes while the kernel runs.

        Loaded where it stands: out of a loop, rows would not fit into the registers.
        """
        start, found = self.at(pointer, index, 4), []
        for k in range(0, count, 4):
            text = f"ld.global.nc.v4.b32 {_registers(0, 4)}, [$4+{4 * k}];"
            found += ptx(text, start, gives=[self.int] * 4, acts=True)
        return found

    def load_float(self, pointer, index):
        return self._floats("ld.global.nc.f32 $0, [$1];", self.at(pointer, index, 4))

    def load_bfloat16(self, pointer, index):
        text = "{ .reg .b16 h, z; mov.b16 z, 0; ld.global.nc.b16 h, [$1]; mov.b32 $0, {z, h}; }"
        return self._floats(text, self.at(pointer, index, 2))

    def load_half(self, pointer, index):
        text = "{ .reg .b16 h; ld.global.nc.b16 h, [$1]; cvt.f32.f16 $0, h; }"
        return self._floats(text, self.at(pointer, index, 2))

    def load_floats(self, pointer, offset: int, count: int) -> list[Value]:
        """1, 2 or 4 floats in a row, which the warp may have written."""
        kind = {1: "f32", 2: "v2.f32", 4: "v4.f32"}[count]
        text = f"ld.global.{kind} {_registers(0, count)}, [${count}+{offset}];"
        return ptx(text, pointer, gives=[self.float] * count, acts=True)

    def store_floats(self, pointer, offset: int, values: Sequence[Value]) -> None:
        """1, 2 or 4 floats in a row."""
        kind = {1: "f32", 2: "v2.f32", 4: "v4.f32"}[len(values)]
        text = f"st.global.{kind} [$0+{offset}], {_registers(1, len(values))};"
        ptx(text, pointer, *values)

    # Control

    def if_(self, condition, like: Sequence[Value], then: Callable, other: Callable) -> list[Value]:
        """The values of one branch or the other, of the types of ``like``."""
        op: Any = scf.IfOp(condition, [value.type for value in like], has_else=True)
        for block, branch in ((op.then_block, then), (op.else_block, other)):
            with ir.InsertionPoint(block):
                scf.yield_(branch())
        return list(op.results)

    def loop(self, first, last, carry: Sequence[Value], body: Callable) -> list[Value]:
        """carry = body(i, carry) for each i below ``last``."""
        op = scf.ForOp(first, last, self.i(1), carry)
        with ir.InsertionPoint(op.body):
            scf.yield_(body(op.induction_variable, list(op.inner_iter_args)))
        return list(op.results)

    def when(self, condition):
        """A block that runs if the condition holds."""
        return utils.when(condition)

    def _floats(self, text: str, *args):
        return ptx(text, *args, gives=self.float)

    def _ints(self, text: str, *args):
        return ptx(text, *args, gives=self.int)


def _registers(first: int, count: int) -> str:
    names = ", ".join(f"${first + k}" for k in range(count))
    return f"{{{names}}}" if count > 1 else names
