"""One warp of decode: the sequences of its share, tile by tile, and what it leaves of each.

The softmax is taken from a bound: the greatest score of the first tile. It moves only if a score
passes it by so much that weights would not fit.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

from jax.experimental.mosaic.gpu import utils

from jkvq.pallas_kernels.mosaic.lanes import Lanes, Value
from jkvq.pallas_kernels.mosaic.means import PageMeans
from jkvq.pallas_kernels.mosaic.program import SLOTS, WARPS, Program
from jkvq.pallas_kernels.mosaic.ring import Ring
from jkvq.pallas_kernels.mosaic.sides.stream_keys import ENTRY
from jkvq.pallas_kernels.mosaic.tile import HEADS, Seen, Tile

_RING = 4  # of what a tile hands on: where the next ones are
_NOTHING = -1e30  # a score that counts for nothing


@dataclass(frozen=True)
class Room:
    """The shared memory of a block: so many bytes of slots are a warpgroup's."""

    slots: Any
    barriers: Any
    warpgroup_bytes: int
    first_barrier: int = 0  # bytes before the barriers that are not in use yet

    def after(self, barriers: int) -> "Room":
        """For the next format: slots are used again, barriers are not."""
        return replace(self, first_barrier=self.first_barrier + barriers)


class Warp:
    """One warp: a share of one KV head and four of its query heads."""

    def __init__(self, program: Program, room: Room, layer, q, arrays: list, outputs: list):
        self.o = o = Lanes()
        self.program, teams = program, program.teams
        self.before, first, last, self.length, self.order, *rest = map(o.global_pointer, arrays)
        self.q = o.global_pointer(q)
        count = sum(len(side.arrays) for side in program.sides)
        pages, rest = rest[:count], rest[count:]
        tables, rest = (rest[:1], rest[1:]) if program.key.stream else ([], rest)
        self.firsts, self.shift = (rest[0], rest[1:]) if program.bounded else (None, rest)
        self.out, self.lse = map(o.global_pointer, outputs)
        loads = {"bf16": o.load_bfloat16, "f16": o.load_half, "f32": o.load_float}
        self.load_query = loads[str(q.type.element_type)]

        self.lane = o.and_(utils.thread_idx(), o.i(31))
        in_group = o.and_(utils.warp_idx(), o.i(WARPS - 1))
        number = o.add(o.mul(utils.warpgroup_idx(), o.i(WARPS)), in_group)
        team, self.in_team = self._divided(number, teams.size)
        of_group = o.div(in_group, o.i(teams.size))
        memory = o.mul(utils.warpgroup_idx(), o.i(room.warpgroup_bytes))
        memory = o.add(memory, o.mul(of_group, o.i(SLOTS * program.slot_bytes)))
        barriers = o.add(o.mul(team, o.i(16 * SLOTS)), o.i(room.first_barrier))
        of_all = o.add(o.mul(team, o.i(program.blocks)), utils.block_idx())
        if program.from_end:
            of_all = o.sub(o.i(program.blocks * teams.count - 1), of_all)
        self.share, group = self._divided(of_all, program.groups)
        self.own, query = self._divided(self.in_team, teams.warps)
        self.head = o.add(o.mul(group, o.i(teams.heads)), self.own)
        self.four = o.mul(query, o.i(HEADS))  # the first of its query heads among the KV head's

        total = o.load(self.before, o.i(program.shape[0]))
        self.start, self.stop = (self._start(o.add(self.share, o.i(k)), total) for k in range(2))
        place = o.min(self.share, o.i(program.shares - 1))
        self.first = o.load(first, place)
        past = o.add(o.load(last, place), o.i(1))
        self.past = o.select(o.lt(self.start, self.stop), past, self.first)
        self.of_layer = o.mul(o.load(o.global_pointer(layer), o.i(0)), o.i(program.pages))

        self.ring = self._make_ring(
            pages,
            group,
            o.add(o.shared_pointer(room.slots), memory),
            o.add(o.shared_pointer(room.barriers), barriers),
        )
        self.tile = Tile(o, self.lane, teams.tile, max(program.key.row, program.value.row))
        size = o.i(4 * ENTRY * program.shape[3])
        table = o.at(tables[0], o.mul(self.head, size)) if tables else None
        self.keys = program.key.keys(self.tile, table)
        self.values = program.value.values(self.tile)

    def _divided(self, number: Value, by: int) -> tuple[Value, Value]:
        return self.o.div(number, self.o.i(by)), self.o.rem(number, self.o.i(by))

    def _start(self, share: Value, total: Value) -> Value:
        """The first unit of a share, as work.py has it."""
        o = self.o
        some = o.min(o.i(self.program.shares), total)
        busy, share = o.max(some, o.i(1)), o.min(share, some)
        rest = o.div(o.mul(share, o.rem(total, busy)), busy)
        return o.add(o.mul(share, o.div(total, busy)), rest)

    def _make_ring(self, pages: list[Value], group: Value, memory: Value, barriers: Value) -> Ring:
        """The team's ring, and where in a slot the warp's own keys and values lie."""
        o, program, teams = self.o, self.program, self.program.teams
        copies, strides, to, self.places = [], [0] * len(pages), 0, []
        for side in program.sides:
            copies += side.copies(teams.heads, program.page, teams.tile, to)
            self.places.append([])
            whole, own = side.bytes(program.page), side.bytes(teams.tile)
            for array, of_page, of_tile in zip(side.arrays, whole, own, strict=True):
                strides[array] = program.shape[1] * of_page
                self.places[-1].append(o.add(o.i(to), o.mul(self.own, o.i(of_tile))))
                to += teams.heads * of_tile
        heads = [o.mul(group, o.i(stride // program.groups)) for stride in strides]
        return Ring(
            *(o, self.lane),
            slots=SLOTS,
            size=program.slot_bytes,
            team=teams.size,
            memory=memory,
            barriers=barriers,
            copies=copies,
            pages=[o.at(pointer, behind) for pointer, behind in zip(pages, heads, strict=True)],
            stride=strides,
        )

    def _tile_at(self, v: Value) -> tuple[Value, Value]:
        """The page of tile v of all, and its number there; any for one past the share's end."""
        o = self.o
        v = o.max(o.min(v, o.sub(self.stop, o.i(1))), o.i(0))
        page, tile = self._divided(o.load(self.order, v), self.program.tiles)
        return o.add(self.of_layer, page), tile

    def run(self) -> None:
        """All sequences of the share; the warpgroup's warps leave together."""
        o = self.o
        with o.when(o.eq(self.in_team, o.i(0))):
            self.ring.set_up()
            for slot in range(SLOTS):
                v = o.add(self.start, o.i(slot))
                with o.when(o.lt(v, self.stop)):
                    self.ring.order(*self._tile_at(v), o.i(slot))
        utils.warpgroup_barrier()
        # The slot of the next tile, its barrier's parity, and what comes into the slot after it
        carry = [o.i(0), o.i(0), *self._tile_at(o.add(self.start, o.i(SLOTS)))]
        o.loop(self.first, self.past, carry, self._sequence)
        utils.warpgroup_barrier()

    def _query_row(self, b: Value, head_of_four: Value) -> Value:
        """The query head of a sequence; the last of a group for those past it."""
        o, (_, K, G, _) = self.o, self.program.shape
        within = o.min(o.add(self.four, head_of_four), o.i(G - 1))
        return o.add(o.mul(b, o.i(K * G)), o.add(o.mul(self.head, o.i(G)), within))

    def _sequence(self, b: Value, carry: list[Value]) -> list[Value]:
        """What the share has of a sequence."""
        o, program = self.o, self.program
        row = o.mul(self._query_row(b, o.shr(self.lane, 3)), o.i(program.shape[3]))
        query = self.keys.query(lambda n: self.load_query(self.q, o.add(row, n)), program.scale)
        self.b, self.tokens = b, o.load(self.length, b)
        begin = o.load(self.before, b)
        first = o.max(self.start, begin)
        # The oldest token that is seen, and where the first tile would be if none were skipped
        self.oldest, self.begin = None, begin
        if self.firsts is not None:
            self.oldest = o.load(self.firsts, b)
            self.begin = o.sub(begin, o.div(self.oldest, o.i(program.teams.tile)))
        past = o.min(self.stop, o.load(self.before, o.add(b, o.i(1))))
        nothing = [*self.values.zero, o.f(0.0), o.f(0.0)]  # and the softmax's sum, minus its bound
        means = self._means(b, row)
        added = [] if means is None else [o.f(0.0)] * 2  # what tiles of the same pages hand on

        def one(v, carry):
            ring, added, state = carry[:_RING], carry[_RING : -len(nothing)], carry[-len(nothing) :]
            less = state[-1]
            if means is not None:
                more, added = means.of_tile(*(o.sub(x, self.begin) for x in (first, v)), added)
                less = o.fadd(more, less)
            found = self._one_tile(v, query, less, o.eq(v, first), [*ring, *state])
            return [*found[:_RING], *added, *found[_RING:]]

        found = o.loop(first, past, [*carry, *added, *nothing], one)
        self._store(found[-len(nothing) :])
        return found[:_RING]

    def _means(self, b: Value, row: Value) -> PageMeans | None:
        """What is added to the scores of a sequence's pages; ``row`` is that of its query."""
        o, program, shift = self.o, self.program, self.program.shift
        if shift is None:
            return None
        queries, turns, *number = self.shift

        def row_of(page: Value) -> Value:
            if number:
                slot = o.min(o.mul(page, o.i(program.page)), o.i(shift.slots - 1))
                found = o.load(number[0], o.add(o.mul(b, o.i(shift.slots)), slot))
            else:
                found = o.add(page, o.i(shift.first))
            return o.min(found, o.i(shift.turns - 1))

        def load(channel: Value) -> Value:
            return o.load_float(queries, o.add(row, channel))

        sizes = program.tiles, program.shape[3]
        return PageMeans(self.tile, *sizes, load, program.scale, turns, row_of)

    def _one_tile(self, v: Value, query: Any, less: Value, is_first: Value, carry: list[Value]):
        """``less`` is added to its scores."""
        o, program, ring = self.o, self.program, self.ring
        slot, parity, page, tile, *carry = carry
        size, base = program.teams.tile, ring.wait(slot, parity)
        key, value = ([o.add(base, at) for at in each] for each in self.places)
        scores = self.keys.scores(key, query, less)
        before = o.mul(o.sub(v, self.begin), o.i(size))
        add = functools.partial(
            _add_tile, o, self.tile, self.values, value, scores, is_first, carry
        )
        past = o.sub(self.tokens, before)
        seen, whole = Seen(o, past), o.lt(o.i(size - 1), past)
        if self.oldest is not None:
            first = o.sub(self.oldest, before)
            seen, whole = Seen(o, past, first), o.and_(whole, o.lt(first, o.i(1)))
        carry = o.if_(whole, carry, lambda: add(None), lambda: add(seen))
        more = o.lt(o.add(v, o.i(SLOTS)), self.stop)
        with o.when(o.and_(ring.leave(slot), more)):
            ring.order(page, tile, slot)
        follows = self._tile_at(o.add(v, o.i(SLOTS + 1)))
        return [*ring.after(slot, parity), *follows, *carry]

    def _store(self, state: list[Value]) -> None:
        """Writes the partial result of a sequence; later parts are added to what is there."""
        o, (_, K, G, H) = self.o, self.program.shape
        *state, norm, bound = state
        norm = self.tile.total(norm)
        found = self.values.outputs(state, o.rcp(o.fmax(norm, o.f(1e-37))))
        mine = o.add(self.four, self.tile.c)
        row = o.add(o.mul(self.head, o.i(G)), mine)
        row = o.add(o.mul(o.add(self.share, self.b), o.i(K * G)), row)
        real = o.lt(mine, o.i(G))
        for number, by_place in enumerate(found):
            start = o.add(o.mul(row, o.i(H)), self.values.word_of(number))
            pointer = o.at(self.out, start, 4)
            if number:
                utils.warp_barrier()
            with o.when(real):
                for behind, outputs in by_place:
                    self._write(pointer, behind, outputs, adds=number > 0)
        with o.when(o.and_(real, o.eq(self.tile.r, o.i(0)))):
            o.store_floats(o.at(self.lse, row, 4), 0, [o.fsub(o.log2(norm), bound)])

    def _write(self, pointer: Value, behind: int, outputs: list[Value], *, adds: bool) -> None:
        o = self.o
        for k in range(0, len(outputs), 4):
            some, offset = outputs[k : k + 4], 4 * (behind + k)
            if adds:
                before = o.load_floats(pointer, offset, len(some))
                some = [o.fadd(*both) for both in zip(some, before, strict=True)]
            o.store_floats(pointer, offset, some)


def _add_tile(o, tile: Tile, values: Any, value: list[Value], scores, is_first, carry, seen):
    """The output, the softmax's sum and its bound with a tile added."""
    if seen is not None:
        scores = [
            o.select(seen.has(tile.token(x)), score, o.f(_NOTHING))
            for x, score in enumerate(scores)
        ]
    top = scores[0]
    for score in scores[1:]:
        top = o.fmax(top, score)

    def move():
        *state, norm, bound = carry
        most = o.fmax(tile.greatest(top), o.select(is_first, o.f(_NOTHING), o.f(0.0)))
        decay = o.select(is_first, o.f(0.0), o.exp2(o.fsub(o.f(0.0), most)))
        moved = [o.fmul(number, decay) for number in (*state, norm)]
        return [*moved, o.fsub(bound, most), *(o.fsub(score, most) for score in scores)]

    far = o.any_above(o.select(is_first, o.f(-_NOTHING), top), o.f(values.far))
    found = o.if_(far, [*carry, *scores], move, lambda: [*carry, *scores])
    (*state, norm, bound), scores = found[: len(carry)], found[len(carry) :]
    p = [o.exp2(score) for score in scores]
    for each in p:
        norm = o.fadd(norm, each)
    return [*values.add(value, p, seen, state), norm, bound]
