"""What is added to the scores of a page, in a warp: q . mean, with the mean where it stands there.

Turns of sixteen pages (types.py, `Shift`) are read as rows of a matrix product, as keys of 16-bit
floats are, by queries that are sums of two such floats. Thread 4 r + c has the result of pages r
and r + 8 for query head c: each page's is taken from there when its turn comes.
"""

from collections.abc import Callable

from jkvq.pallas_kernels.mosaic.lanes import Value
from jkvq.pallas_kernels.mosaic.sides.floats import PIECE, FloatQuery, channels_of, float_query
from jkvq.pallas_kernels.mosaic.tile import Tile

_PAGES = 16  # at once


class PageMeans:
    """Of the pages of one sequence.

    Args:
        tile: of the warp; tiles: of a page.
        channels: of a head.
        load: gives a channel of the queries, by its number, of query head thread // 8.
        scale: of scores.
        turns: where all rows of turns begin.
        row_of: the row of a page, by its number in the sequence.
    """

    def __init__(
        self,
        tile: Tile,
        tiles: int,
        channels: int,
        load: Callable[[Value], Value],
        scale: float,
        turns: Value,
        row_of: Callable[[Value], Value],
    ):
        self.tile, self.tiles, self.channels = tile, tiles, channels
        self.load, self.scale = load, scale
        self.turns, self.row_of = turns, row_of

    def _query(self) -> tuple[FloatQuery, Value]:
        """The query, and what a product with it is worth, of query head c.

        Made anew for every sixteen pages: registers that hold it meanwhile are dearer. It is
        divided by its greatest number, as float16 does not reach far.
        """
        tile, o, most = self.tile, self.tile.o, self.tile.o.f(1e-30)
        values = [
            [self.load(channel) for channel in four] for four in channels_of(tile, self.channels)
        ]
        for value in (value for four in values for value in four):
            most = o.fmax(most, o.fabs(value))
        for distance in (1, 2):
            most = o.fmax(most, o.swap(most, distance))
        inverse = o.rcp(most)
        scaled = [[o.fmul(value, inverse) for value in four] for four in values]
        worth = o.fmul(o.take(most, o.shl(tile.c, 3)), o.f(self.scale))
        return float_query(tile, scaled, "f16", 1.0), worth

    def of_tile(self, first: Value, at: Value, scores: list[Value]) -> tuple[Value, list[Value]]:
        """What is added to a tile, and the scores of its page and the fifteen around it.

        ``first`` and ``at`` are the numbers in the sequence of the first tile that the warp has of
        it, and of this one.
        """
        o = self.tile.o
        page = o.div(at, o.i(self.tiles))
        number = o.rem(o.sub(page, o.div(first, o.i(self.tiles))), o.i(_PAGES))
        begins = o.or_(o.eq(o.rem(at, o.i(self.tiles)), o.i(0)), o.eq(at, first))
        due = o.and_(begins, o.eq(number, o.i(0)))
        scores = o.if_(due, scores, lambda: self.scores(page), lambda: scores)
        thread = o.add(o.shl(o.and_(number, o.i(7)), 2), self.tile.c)
        return o.take(o.select(o.lt(number, o.i(8)), *scores), thread), scores

    def scores(self, first: Value) -> list[Value]:
        """Of pages first + r and first + r + 8; of query head c."""
        tile, o = self.tile, self.tile.o
        rows = [self._row(self.row_of(o.add(first, o.add(tile.r, o.i(k))))) for k in (0, 8)]
        query, worth = self._query()
        total = [o.f(0.0)] * 4
        for step, own in enumerate(query.steps):
            a = [row[2 * step + half] for half in range(2) for row in rows]
            total = o.multiply_floats(total, a, own, "f16")
        return [o.fmul(o.fadd(total[k], total[k + 1]), worth) for k in (0, 2)]

    def _row(self, row: Value) -> list[Value]:
        """A thread's pieces of a row."""
        o = self.tile.o
        first = o.add(o.mul(row, o.i(self.channels // 2)), o.mul(self.tile.c, o.i(PIECE // 2)))
        return [
            value
            for at in range(0, self.channels // 2, 2 * PIECE)
            for value in o.load_row(self.turns, o.add(first, o.i(at)), PIECE // 2)
        ]
