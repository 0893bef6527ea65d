"""How kernels read stored tokens: as tiles that go straight into matrix products (unpack.py).

Each class reads one side of the cache in one format: ``query`` and ``scores`` for keys, ``zero``,
``add`` and ``finish`` for values.
"""

from dataclasses import dataclass, field

import jax.numpy as jnp
from jax import lax

from jkvq.pallas_kernels.formats.codecs import (
    AffineCodec,
    Codec,
    DigitCodec,
    FloatCodec,
    LloydCodec,
)
from jkvq.pallas_kernels.formats.digits import place_of
from jkvq.pallas_kernels.formats.lloyd import TERMS
from jkvq.pallas_kernels.formats.packed import Packed
from jkvq.pallas_kernels.formats.packing import WORD
from jkvq.pallas_kernels.settings import ROWS
from jkvq.pallas_kernels.triton.unpack import (
    Piece,
    code_tile,
    dot,
    level_tile,
    pieces,
    stream_tile,
    weight,
)

_STREAM_PIECE = 32  # channels of a stream that are read at once


@dataclass(frozen=True)
class Page:
    """Loads of one page of one side, one head."""

    refs: dict  # codes, and params and index where there are any
    at: tuple  # layer, page, head
    tokens: int
    loaded: dict = field(default_factory=dict)  # tiles, by their columns

    def words(self, start, width: int, wrap: int | None = None):
        """A tile [p, width] of words from ``start`` on, going round after ``wrap`` of them."""
        if (start, width, wrap) not in self.loaded:
            column = lax.broadcasted_iota(jnp.int32, (1, width), 1)
            column = start + (column if wrap is None else lax.rem(column, wrap))
            shape = (self.tokens, width)
            token = lax.broadcasted_iota(jnp.int32, shape, 0)
            at = (*self.at, token, jnp.broadcast_to(column, shape))
            self.loaded[start, width, wrap] = self.refs["codes"][at]
        return self.loaded[start, width, wrap]

    def rows(self, name: str, row):
        """The words [n, p] of every token in rows [n, 1] of params, or of a stream's codes."""
        shape = (row.shape[0], self.tokens)
        token = lax.broadcasted_iota(jnp.int32, shape, 1)
        return self.refs[name][(*self.at, jnp.broadcast_to(row, shape), token)]

    def param(self, i: int, floats=jnp.bfloat16):
        """A number [p] of every token."""
        words = self.refs["params"][(*self.at, i)]
        return lax.bitcast_convert_type(words, floats).astype(jnp.float32)

    def index(self, count: int):
        """The centroid [p] of every token, of so many; the last where a slot holds anything."""
        layer, page, _ = self.at
        return jnp.minimum(self.refs["index"][layer, page].astype(jnp.int32), count - 1)


class FloatTiles:
    """Whole 16-bit floats, of pages or windows."""

    def __init__(self, codec: FloatCodec, channels: int, *, exact_query: bool):
        self.floats, self.channels = codec.floats, channels
        self.one_is_enough = exact_query or codec.floats == jnp.float16

    def query(self, load, scale):
        """The query in one number of 16 bits, or as the sum of two where one is not enough."""
        q = load(_span(0, self.channels))
        high = q.astype(self.floats)
        if self.one_is_enough:
            return scale, (high,)
        return scale, (high, (q - high.astype(jnp.float32)).astype(self.floats))

    def scores(self, query, page: Page):
        scale, parts = query
        tile = lax.bitcast_convert_type(page.words(0, self.channels), self.floats)
        return scale * sum(dot(part, tile, (1, 1)) for part in parts)

    def zero(self):
        return jnp.zeros((ROWS, self.channels), jnp.float32)

    def add(self, total, weights, decay, page: Page, real):
        words = jnp.where(real[:, None], page.words(0, self.channels), jnp.uint16(0))
        tile = lax.bitcast_convert_type(words, self.floats)
        return total * decay[:, None] + dot(weights.astype(self.floats), tile, (1, 0))

    def finish(self, total):
        return [(0, total)]


class AffineTiles:
    """lo + scale * code for each group of channels, on top of a centroid if there are any."""

    def __init__(self, codec: AffineCodec, channels: int, head, centroids, *, interpret: bool):
        group = codec.group or channels
        self.parts, self.groups = pieces(codec.bits, channels, group), channels // group
        self.head, self.centroids, self.interpret = head, centroids, interpret

    def _tile(self, page: Page, piece: Piece):
        words = page.words(piece.word, piece.width, piece.wrap)
        return code_tile(words, piece, interpret=self.interpret)

    def _centroids(self, index, piece: Piece):
        shape = (index.shape[0], piece.width)
        column = piece.start + lax.broadcasted_iota(jnp.int32, shape, 1)
        row = jnp.broadcast_to(index[:, None], shape)
        return self.centroids[row, self.head, column]

    def _query(self, load, piece: Piece):
        """A query where a piece is."""
        return load(_span(piece.start, piece.width))

    def query(self, load, scale):
        plain = [self._query(load, piece) * scale for piece in self.parts[0]]
        sums = [0.0] * self.groups
        for piece, q in zip(self.parts[0], plain, strict=True):
            sums[piece.group] += q.sum(1)
        parts = []
        for part in self.parts:
            parts.append([])
            for piece, q in zip(part, plain, strict=True):
                parts[-1].append((q * (piece.worth / weight(piece))).astype(jnp.float16))
        exact = [q.astype(jnp.float16) for q in plain] if self.centroids is not None else []
        return parts, sums, exact

    def scores(self, query, page: Page):
        parts, sums, exact = query
        products = [0.0] * self.groups
        for part, qs in zip(self.parts, parts, strict=True):
            for piece, q in zip(part, qs, strict=True):
                products[piece.group] += dot(q, self._tile(page, piece), (1, 1))
        total = 0.0
        for n in range(self.groups):
            scale, lo = page.param(n), page.param(self.groups + n)
            total += products[n] * scale[None] + sums[n][:, None] * lo[None]
        if self.centroids is not None:
            index = page.index(self.centroids.shape[0])
            for piece, q in zip(self.parts[0], exact, strict=True):
                total += dot(q, self._centroids(index, piece), (1, 1))
        return total

    def zero(self):
        def tiles(part):
            return [jnp.zeros((ROWS, piece.width), jnp.float32) for piece in part]

        row = [jnp.zeros(ROWS, jnp.float32)] * self.groups
        exact = tiles(self.parts[0]) if self.centroids is not None else []
        # sums of codes and of lo; the greatest scale, which the weights are divided by
        return [tiles(part) for part in self.parts], row, jnp.float32(2.0**-100), exact

    def add(self, total, weights, decay, page: Page, real):
        parts, base, top, exact = total
        scales = [jnp.where(real, page.param(n), 0.0) for n in range(self.groups)]
        los = [jnp.where(real, page.param(self.groups + n), 0.0) for n in range(self.groups)]
        new_top = top
        for scale in scales:
            new_top = jnp.maximum(new_top, scale.max())
        shrink = decay * (top / new_top)
        scaled = [(weights * (s / new_top)[None]).astype(jnp.float16) for s in scales]
        base = [b * decay + (weights * lo[None]).sum(1) for b, lo in zip(base, los, strict=True)]
        parts = [
            [
                acc * shrink[:, None] + dot(scaled[piece.group], self._tile(page, piece), (1, 0))
                for piece, acc in zip(part, accs, strict=True)
            ]
            for part, accs in zip(self.parts, parts, strict=True)
        ]
        if self.centroids is not None:
            index, w = page.index(self.centroids.shape[0]), weights.astype(jnp.float16)
            exact = [
                acc * decay[:, None] + dot(w, self._centroids(index, piece), (1, 0))
                for piece, acc in zip(self.parts[0], exact, strict=True)
            ]
        return parts, base, new_top, exact

    def finish(self, total):
        parts, base, top, exact = total
        found = []
        for i, piece in enumerate(self.parts[0]):
            out = base[piece.group][:, None]
            for part, accs in zip(self.parts, parts, strict=True):
                out = out + accs[i] * (top * part[i].worth / weight(part[i]))
            found.append((piece.start, out + exact[i] if exact else out))
        return found


class DigitTiles(AffineTiles):
    """Keys of unequal widths in columns of equal ones: the query is spread over them."""

    def __init__(self, codec: DigitCodec, channels: int, head, *, interpret: bool):
        super().__init__(codec.columns, channels, head, None, interpret=interpret)
        self.codec, self.channels = codec, channels

    def _query(self, load, piece: Piece):
        start, place = place_of(piece.start, self.codec.digits, self.channels)
        return load(_span(start, piece.width)) * place.factor(self.codec.bits)


class LevelTiles:
    """unit * level[code], the same width everywhere."""

    def __init__(self, codec: LloydCodec, channels: int, *, interpret: bool):
        self.channels, self.bits, self.interpret = channels, codec.bits, interpret
        self.parts = pieces(codec.bits, channels, channels)

    def _tile(self, page: Page, i: int):
        words = [page.words(part[i].word, part[i].width, part[i].wrap) for part in self.parts]
        parts = [part[i] for part in self.parts]
        return level_tile(words, parts, self.channels, interpret=self.interpret)

    def query(self, load, scale):
        pieces = self.parts[0]
        return [(load(_span(p.start, p.width)) * scale).astype(jnp.float16) for p in pieces]

    def scores(self, query, page: Page):
        total = sum(dot(q, self._tile(page, i), (1, 1)) for i, q in enumerate(query))
        return total * page.param(0, jnp.float16)[None]

    def zero(self):
        return _scaled_zero([piece.width for piece in self.parts[0]])

    def add(self, total, weights, decay, page: Page, real):
        scale = jnp.where(real, page.param(0, jnp.float16), 0.0)
        return _scaled_add(total, weights, decay, scale, lambda i: self._tile(page, i))

    def finish(self, total):
        tiles, top = total
        return [(p.start, tile * top) for p, tile in zip(self.parts[0], tiles, strict=True)]


class StreamTiles:
    """unit * level[code] in a stream, each channel of its own width and with its group's unit.

    The loop over channels keeps what differs by channel from filling the registers.
    """

    def __init__(self, channels: int, head, refs: dict, *, interpret: bool):
        self.channels, self.head, self.refs, self.interpret = channels, head, refs, interpret

    def query(self, load, scale):
        return load, scale

    def scores(self, query, page: Page):
        load, scale = query

        def some(i, total):
            channel = i * _STREAM_PIECE + jnp.arange(_STREAM_PIECE, dtype=jnp.int32)
            q = (load(channel) * scale).astype(jnp.float16)
            return total + dot(q, self._tile(page, channel[:, None]), (1, 0))

        nothing = jnp.zeros((ROWS, page.tokens), jnp.float32)
        return lax.fori_loop(0, self.channels // _STREAM_PIECE, some, nothing)

    def _tile(self, page: Page, channel):
        offset, width, group = (
            self.refs[name][self.head, channel] for name in ("offset", "width", "group")
        )
        word, last = offset >> 4, self.refs["codes"].shape[-2] - 1  # a word has 2^4 bits
        low, high = (page.rows("codes", jnp.minimum(x, last)) for x in (word, word + 1))
        levels = [
            self.refs["levels"][self.head, channel, i].astype(jnp.float16) for i in range(TERMS)
        ]
        unit = lax.bitcast_convert_type(page.rows("params", group), jnp.float16)
        bit = offset & (WORD - 1)
        return stream_tile(low, high, bit, width, levels, unit, interpret=self.interpret)


def _span(start: int, width: int):
    return start + jnp.arange(width, dtype=jnp.int32)


def _scaled_zero(widths: list[int]):
    """Sums of tiles over the greatest scale so far, and that scale."""
    return [jnp.zeros((ROWS, width), jnp.float32) for width in widths], jnp.float32(2.0**-100)


def _scaled_add(total, weights, decay, scale, tile):
    """Adds tiles with weights and a scale for each token, in float16 whatever the scales are."""
    tiles, top = total
    new_top = jnp.maximum(top, scale.max())
    scaled = (weights * (scale / new_top)[None]).astype(jnp.float16)
    shrink = (decay * (top / new_top))[:, None]
    added = [acc * shrink + dot(scaled, tile(i), (1, 0)) for i, acc in enumerate(tiles)]
    return added, new_top


def codec_operands(pages: Packed, codec: Codec) -> dict:
    """What a kernel reads of one side."""
    operands = {"codes": pages.codes, "params": pages.params, "index": pages.index}
    if isinstance(codec, AffineCodec) and codec.centroids is not None:
        operands["centroids"] = codec.centroids.astype(jnp.float16)
    if isinstance(codec, LloydCodec) and codec.allocation is not None:
        operands |= {
            name: getattr(codec.allocation, name) for name in ("offset", "width", "group", "levels")
        }
    return {name: value for name, value in operands.items() if value is not None}


def numbers_of(codec: Codec) -> Codec:
    """The codec's numbers alone: its arrays are operands."""
    if isinstance(codec, AffineCodec):
        return AffineCodec(codec.bits, codec.group, codec.step)
    return LloydCodec(codec.bits, codec.step) if isinstance(codec, LloydCodec) else codec


def make_tiles(codec: Codec, refs: dict, channels: int, head, *, exact_query, interpret):
    """The reader of one side inside a kernel."""
    if isinstance(codec, AffineCodec):
        return AffineTiles(codec, channels, head, refs.get("centroids"), interpret=interpret)
    if isinstance(codec, DigitCodec):
        return DigitTiles(codec, channels, head, interpret=interpret)
    if isinstance(codec, LloydCodec):
        if "offset" in refs:
            return StreamTiles(channels, head, refs, interpret=interpret)
        return LevelTiles(codec, channels, interpret=interpret)
    return FloatTiles(codec, channels, exact_query=exact_query)
