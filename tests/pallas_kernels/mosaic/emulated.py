"""The 32 threads of a warp in numpy: what `Lanes` does on a GPU."""

import ml_dtypes
import numpy as np

from jkvq.pallas_kernels.mosaic.tile import Seen

_LANE = np.arange(32)
_R, _C = _LANE // 4, _LANE % 4


def _bytes(x, kind: type = np.uint8):
    return np.ascontiguousarray(x).view(kind).reshape(32, -1)


def _floats(a):
    """The two 16-bit floats of each register, in float64."""
    return _bytes(a, np.float16).astype(np.float64)


def _halves(x):
    return np.ascontiguousarray(x.astype(np.float16)).view(np.uint32).reshape(32)


def outputs_of(values, state, inverse, channels: int) -> np.ndarray:
    """The outputs of a side's values, by query heads and channels."""
    found = np.zeros((4, channels))
    for number, by_place in enumerate(values.outputs(state, inverse)):
        for behind, outputs in by_place:
            for k, output in enumerate(outputs):
                channel = values.word_of(number).astype(np.int64) + behind + k
                found[_C, channel] += output
    return found


class Emulated:
    """Integers are uint32 and floats float32, one for each thread."""

    def __init__(self, shared: np.ndarray):
        self.shared = shared  # bytes of shared memory

    def i(self, number):
        return np.full(32, number & 0xFFFFFFFF, np.uint32)

    def f(self, number):
        return np.full(32, number, np.float32)

    def add(self, a, b):
        return a + b

    def sub(self, a, b):
        return a - b

    def mul(self, a, b):
        return a * b

    def div(self, a, b):
        return a // b

    def rem(self, a, b):
        return a % b

    def and_(self, a, b):
        return a & b

    def or_(self, a, b):
        return a | b

    def xor(self, a, b):
        return a ^ b

    def shl(self, a, by):
        return a << np.uint32(by)

    def shr(self, a, by):
        return a >> np.uint32(by)

    def shl_by(self, a, by):
        return a << by

    def shr_by(self, a, by):
        return a >> by

    def signed_shr(self, a, by):
        return (a.view(np.int32) >> by.view(np.int32)).view(np.uint32)

    def eq(self, a, b):
        return a == b

    def lt(self, a, b):
        return a.view(np.int32) < b.view(np.int32)

    def select(self, condition, a, b):
        return np.where(condition, a, b)

    def fadd(self, a, b):
        return a + b

    def fsub(self, a, b):
        return a - b

    def fmul(self, a, b):
        return a * b

    def ffma(self, a, b, c):
        return (a.astype(np.float64) * b + c).astype(np.float32)

    def fmax(self, a, b):
        return np.fmax(a, b)  # the number, where one is NaN

    def fabs(self, a):
        return np.abs(a)

    def rcp(self, a):
        return np.float32(1) / a

    def exp2(self, a):
        return np.exp2(a)

    def log2(self, a):
        return np.log2(a)

    def to_float(self, a):
        return a.view(np.int32).astype(np.float32)

    def to_int(self, a):
        return np.rint(a).astype(np.int32).view(np.uint32)

    def as_float(self, a):
        return a.view(np.float32)

    def as_int(self, a):
        return a.view(np.uint32)

    def short(self, a, kind):
        floats = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[kind]
        return a.astype(floats).view(np.uint16).astype(np.uint32)

    def from_short(self, a, kind):
        floats = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[kind]
        return a.astype(np.uint16).view(floats).astype(np.float32)

    def bytes_of(self, a, b, selector):
        both = np.concatenate([_bytes(a), _bytes(b)], axis=1)
        at = np.stack([(selector >> np.uint32(4 * k)) & np.uint32(15) for k in range(4)], axis=1)
        picked = np.take_along_axis(both, (at & 7).astype(np.int64), 1)
        picked = np.where(at > 7, picked.view(np.int8) >> 7, picked.view(np.int8))
        return np.ascontiguousarray(picked).view(np.uint32).reshape(32)

    def halves_mul(self, a, b):
        return _halves(_floats(a) * _floats(b))

    def halves_fma(self, a, b, c):
        return _halves(_floats(a) * _floats(b) + _floats(c))

    def swap(self, a, distance):
        return a[_LANE ^ distance]

    def take(self, a, thread):
        return a[thread.astype(np.int64)]

    def transpose(self, a):
        matrix = np.ascontiguousarray(a).view(np.uint16).reshape(8, 8)
        return np.ascontiguousarray(matrix.T).view(np.uint32).reshape(32)

    def multiply_bytes(self, total, a, b, kind):
        left, right = (np.int8 if name[0] == "s" else np.uint8 for name in kind.split("."))
        A, B = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64)
        for k, (row, column) in enumerate([(0, 0), (8, 0), (0, 16), (8, 16)]):
            for e in range(4):
                A[_R + row, 4 * _C + e + column] = _bytes(a[k], left)[:, e]
        for k in range(2):
            for e in range(4):
                B[4 * _C + e + 16 * k, _R] = _bytes(b[k], right)[:, e]
        product = A @ B
        assert np.abs(product).max() < 2**31
        return [
            (total[k].view(np.int32) + product[_R + row, 2 * _C + column].astype(np.int32)).view(
                np.uint32
            )
            for k, (row, column) in enumerate([(0, 0), (0, 1), (8, 0), (8, 1)])
        ]

    def multiply_floats(self, total, a, b, kind):
        floats = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[kind]
        A, B = np.zeros((16, 16)), np.zeros((16, 8))
        for k, (row, column) in enumerate([(0, 0), (8, 0), (0, 8), (8, 8)]):
            for e in range(2):
                A[_R + row, 2 * _C + e + column] = _bytes(a[k], floats)[:, e]
        for k in range(2):
            for e in range(2):
                B[2 * _C + e + 8 * k, _R] = _bytes(b[k], floats)[:, e]
        product = A @ B
        return [
            (total[k] + product[_R + row, 2 * _C + column]).astype(np.float32)
            for k, (row, column) in enumerate([(0, 0), (0, 1), (8, 0), (8, 1)])
        ]

    def if_(self, condition, like, then, other):
        """The condition is the same in all threads."""
        assert condition.all() or not condition.any()
        del like
        return then() if condition.all() else other()

    def load_row(self, pointer, index, count):
        """``pointer`` is an array of integers here."""
        rows = pointer.reshape(-1)[index.astype(np.int64)[:, None] + np.arange(count)[None]]
        return [np.ascontiguousarray(rows[:, k]).view(np.uint32) for k in range(count)]

    def load_shared(self, address, offset, count):
        first = address.astype(np.int64) + offset
        assert (first % (4 * count) == 0).all(), "not aligned"
        words = self.shared[first[:, None] + np.arange(4 * count)[None]].copy().view(np.uint32)
        return [np.ascontiguousarray(words[:, k]) for k in range(count)]

    def load_shared_half(self, address, offset):
        first = address.astype(np.int64) + offset
        assert (first % 2 == 0).all(), "not aligned"
        halves = self.shared[first[:, None] + np.arange(2)[None]].copy().view(np.uint16)
        return halves.reshape(32).astype(np.uint32)


def seen_in(o: Emulated, first: int | None, past: int | None) -> Seen | None:
    """The tokens of a tile from ``first`` on and before ``past``; None for all of them."""
    if past is None:
        return None
    return Seen(o, o.i(past), None if first is None else o.i(first))
