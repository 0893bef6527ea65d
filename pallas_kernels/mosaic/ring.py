"""Tiles of pages on their way to shared memory: a ring of slots that a team of warps reads from.

A team's warps read the same pages: some KV heads, and of each as many warps as its query heads
need. The bytes of a tile come by a few bulk copies, which one mbarrier for each slot counts; the
warp that is the last to leave a slot orders the next tile into it. Nothing else is waited for.
"""

from dataclasses import dataclass
from typing import NamedTuple

from jax.experimental.mosaic.gpu import utils

from jkvq.pallas_kernels.mosaic.lanes import Lanes, Value
from jkvq.pallas_kernels.mosaic.ptx import ptx

_WAIT = """{
    .reg .pred p;
    wait_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1, 0x989680;
    @p bra done_${:uid};
    bra wait_${:uid};
    done_${:uid}:
}"""
_LEAVE = """{
    .reg .pred p;
    setp.eq.u32 p, $2, 0;
    @p atom.acq_rel.cta.shared::cta.add.u32 $0, [$1], 1;
    shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff;
}"""
_COPY = (
    "@$5 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[$0], [$1], $2, [$3], $4;"
)


class Copy(NamedTuple):
    """Bytes of every tile that are copied at once.

    array: which of the arrays of pages they come from.
    first: bytes before them in the part of a page that the team's heads have.
    step: bytes from a tile of a page to the next.
    to: where they go in a slot.
    """

    array: int
    first: int
    step: int
    to: int
    size: int


@dataclass(frozen=True)
class Side:
    """How the keys, or the values, of a team's heads lie in a page and in a slot.

    arrays: of codes, and of params if there are any: their numbers.
    row: bytes of a token's codes; params: 16-bit numbers of a token besides.
    """

    arrays: tuple[int, ...]
    row: int
    params: int

    def bytes(self, tokens: int) -> list[int]:
        """Of so many tokens of one head, in each array."""
        return [tokens * self.row, 2 * tokens * self.params][: len(self.arrays)]

    def copies(self, heads: int, page: int, tile: int, to: int) -> list[Copy]:
        """Of a tile of so many heads; it takes ``heads * sum(bytes(tile))`` in a slot."""
        found = []
        for array, whole, own in zip(self.arrays, self.bytes(page), self.bytes(tile), strict=True):
            rows = self.params if array != self.arrays[0] else 1
            if page == tile:
                found.append(Copy(array, 0, 0, to, heads * own))
            else:
                found += [
                    Copy(
                        array,
                        (head * rows + n) * whole // rows,
                        own // rows,
                        to + (head * rows + n) * own // rows,
                        own // rows,
                    )
                    for head in range(heads)
                    for n in range(rows)
                ]
            to += heads * own
        return found


class Ring:
    """A team's slots.

    Args:
        o: the warp's instructions.
        lane: the thread's number in its warp.
        slots: how many.
        size: bytes of one.
        team: warps that read a slot.
        memory: where the slots begin in shared memory; barriers: two times 8 bytes for each slot.
        copies: of every tile.
        pages: pointers to the arrays of pages at the team's first head.
        stride: bytes of a page in each array, all heads.
    """

    def __init__(
        self,
        o: Lanes,
        lane: Value,
        *,
        slots: int,
        size: int,
        team: int,
        memory: Value,
        barriers: Value,
        copies: list[Copy],
        pages: list[Value],
        stride: list[int],
    ):
        self.o, self.lane, self.slots, self.size, self.team = o, lane, slots, size, team
        self.memory, self._barriers = memory, barriers
        self._counts = o.add(barriers, o.i(8 * slots))
        self._first = o.eq(lane, o.i(0))
        self._copies = o.lt(lane, o.i(len(copies)))

        def mine(numbers: list[Value]) -> Value:  # of the thread's own copy
            value = numbers[-1]
            for k in reversed(range(len(numbers) - 1)):
                value = o.select(o.eq(lane, o.i(k)), numbers[k], value)
            return value

        self._source = mine([o.at(pages[copy.array], o.i(copy.first)) for copy in copies])
        self._stride = mine([o.i(stride[copy.array]) for copy in copies])
        self._step = mine([o.i(copy.step) for copy in copies])
        self._to = o.add(memory, mine([o.i(copy.to) for copy in copies]))
        self._size = mine([o.i(copy.size) for copy in copies])
        text = "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;"
        self._policy = ptx(text, gives=o.long)

    def set_up(self) -> None:
        """By one warp of the team; others may come when all threads have met behind it."""
        o = self.o
        for slot in range(self.slots):
            barrier, count = (
                o.add(start, o.i(size * slot))
                for start, size in ((self._barriers, 8), (self._counts, 4))
            )
            ptx("@$1 mbarrier.init.shared::cta.b64 [$0], 1;", barrier, self._first)
            ptx("@$2 st.shared.b32 [$0], $1;", count, o.i(0), self._first)
        ptx("fence.mbarrier_init.release.cluster;")
        utils.warp_barrier()

    def order(self, page: Value, tile: Value, slot: Value) -> None:
        """Has a tile of a page copied into a slot."""
        o = self.o
        barrier = o.add(self._barriers, o.mul(slot, o.i(8)))
        text = "@$2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
        ptx(text, barrier, o.i(self.size), self._first)
        text = "mad.wide.u32 $0, $1, $2, $3;"
        source = ptx(text, page, self._stride, self._source, gives=o.long)
        source = ptx(text, tile, self._step, source, gives=o.long)
        to = o.add(self._to, o.mul(slot, o.i(self.size)))
        ptx(_COPY, to, source, self._size, barrier, self._policy, self._copies)

    def wait(self, slot: Value, parity: Value) -> Value:
        """Where the slot's tile begins, when it is there."""
        o = self.o
        ptx(_WAIT, o.add(self._barriers, o.mul(slot, o.i(8))), parity)
        return o.add(self.memory, o.mul(slot, o.i(self.size)))

    def leave(self, slot: Value) -> Value:
        """Whether this warp is the last of its team to leave a slot."""
        o = self.o
        utils.warp_barrier()
        count = o.together(_LEAVE, o.add(self._counts, o.mul(slot, o.i(4))), self.lane)
        return o.eq(o.and_(count, o.i(self.team - 1)), o.i(self.team - 1))

    def after(self, slot: Value, parity: Value) -> tuple[Value, Value]:
        """The next slot, and the parity of its barrier."""
        o = self.o
        end = o.eq(slot, o.i(self.slots - 1))
        parity = o.xor(parity, o.select(end, o.i(1), o.i(0)))
        return o.select(end, o.i(0), o.add(slot, o.i(1))), parity
