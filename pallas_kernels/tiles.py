"""How kernels read stored tokens: as tiles that go straight into matrix products (unpack.py).

Each class reads one side of the cache in one format: ``query`` and ``scores`` for keys, ``zero``,
``add`` and ``finish`` for values.
"""

from dataclasses import dataclass, field

import jax.numpy as jnp
from jax import lax

from jkvq.pallas_kernels import lloyd
from jkvq.pallas_kernels.codecs import AffineCodec, Codec, LloydCodec
from jkvq.pallas_kernels.packed import Packed
from jkvq.pallas_kernels.packing import WORD, stream_offsets
from jkvq.pallas_kernels.unpack import Piece, code_tile, dot, level_tile, pieces, weight

ROWS = 16  # of a matrix product, the least a tensor core takes: query heads, filled up
_STREAM_PIECE = 32  # channels of a stream that are looked up at once


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
            column = start + (column if wrap is None else column % wrap)
            self.loaded[start, width, wrap] = self.gathered(column)
        return self.loaded[start, width, wrap]

    def gathered(self, column):
        """The words at columns [1, H] of every token."""
        shape = (self.tokens, column.shape[1])
        token = lax.broadcasted_iota(jnp.int32, shape, 0)
        at = (*self.at, token, jnp.broadcast_to(column, shape))
        return self.refs["codes"][at]

    def param(self, i):
        """A number [p] of every token."""
        words = self.refs["params"][(*self.at, i)]
        return lax.bitcast_convert_type(words, jnp.bfloat16).astype(jnp.float32)

    def index(self):
        layer, page, _ = self.at
        return self.refs["index"][layer, page].astype(jnp.int32)


class FloatTiles:
    """Whole bfloat16 numbers, of pages or windows."""

    def __init__(self, channels: int, *, exact_query: bool):
        self.channels, self.exact_query = channels, exact_query

    def query(self, load, scale):
        """The query in one bfloat16 number, or as the sum of two where one is not enough."""
        q = load(0, self.channels)
        high = q.astype(jnp.bfloat16)
        if self.exact_query:
            return scale, (high,)
        return scale, (high, (q - high.astype(jnp.float32)).astype(jnp.bfloat16))

    def scores(self, query, page: Page):
        scale, parts = query
        tile = lax.bitcast_convert_type(page.words(0, self.channels), jnp.bfloat16)
        return scale * sum(dot(part, tile, (1, 1)) for part in parts)

    def zero(self):
        return jnp.zeros((ROWS, self.channels), jnp.float32)

    def add(self, total, weights, decay, page: Page, real):
        words = jnp.where(real[:, None], page.words(0, self.channels), jnp.uint16(0))
        tile = lax.bitcast_convert_type(words, jnp.bfloat16)
        return total * decay[:, None] + dot(weights.astype(jnp.bfloat16), tile, (1, 0))

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

    def query(self, load, scale):
        plain = [load(piece.start, piece.width) * scale for piece in self.parts[0]]
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
            index = page.index()
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
            index, w = page.index(), weights.astype(jnp.float16)
            index = jnp.where(real, index, 0)
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


class LevelTiles:
    """norm / sqrt(d) * level[code], the same width everywhere: the levels come from registers."""

    def __init__(self, codec: LloydCodec, channels: int, *, interpret: bool):
        self.channels, self.bits, self.interpret = channels, codec.bits, interpret
        self.parts = pieces(codec.bits, channels, channels)

    def _tile(self, page: Page, i: int):
        words = [page.words(part[i].word, part[i].width, part[i].wrap) for part in self.parts]
        return level_tile(words, [part[i] for part in self.parts], interpret=self.interpret)

    def _scale(self, page: Page):
        return page.param(0) * self.channels**-0.5

    def query(self, load, scale):
        pieces = self.parts[0]
        return [(load(p.start, p.width) * scale).astype(jnp.float16) for p in pieces]

    def scores(self, query, page: Page):
        total = sum(dot(q, self._tile(page, i), (1, 1)) for i, q in enumerate(query))
        return total * self._scale(page)[None]

    def zero(self):
        return _scaled_zero([piece.width for piece in self.parts[0]])

    def add(self, total, weights, decay, page: Page, real):
        scale = jnp.where(real, self._scale(page), 0.0)
        return _scaled_add(total, weights, decay, scale, lambda i: self._tile(page, i))

    def finish(self, total):
        tiles, top = total
        return [(p.start, tile * top) for p, tile in zip(self.parts[0], tiles, strict=True)]


class StreamTiles:
    """norm / sqrt(d) * level[code] for each group of channels of equal width, in a stream."""

    def __init__(self, channels: int, head, refs: dict):
        self.head, self.refs = head, refs
        self.starts = range(0, channels, _STREAM_PIECE)

    def _columns(self, name: str, start: int):
        """What a table says of the channels of a piece, [1, width]."""
        column = start + lax.broadcasted_iota(jnp.int32, (1, _STREAM_PIECE), 1)
        return self.refs[name][self.head, column]

    def _tile(self, page: Page, start: int):
        width, offset = (self._columns(name, start) for name in ("width", "offset"))
        word = offset // WORD
        # The last code ends with the stream: past it there is nothing to read.
        after = jnp.minimum(word + 1, self.refs["codes"].shape[-1] - 1)
        low, high = (page.gathered(column).astype(jnp.int32) for column in (word, after))
        codes = ((low | (high << WORD)) >> (offset % WORD)) & (jnp.left_shift(1, width) - 1)
        return self.refs["levels"][width * 256 + codes]

    def query(self, load, scale):
        groups = range(self.refs["unit"].shape[1])
        found = []
        for start in self.starts:
            q, group = load(start, _STREAM_PIECE) * scale, self._columns("group", start)
            found.append([jnp.where(group == n, q, 0.0).astype(jnp.float16) for n in groups])
        return found

    def scores(self, query, page: Page):
        groups = range(self.refs["unit"].shape[1])
        products = [0.0 for _ in groups]
        for start, qs in zip(self.starts, query, strict=True):
            tile = self._tile(page, start)
            for n in groups:
                products[n] += dot(qs[n], tile, (1, 1))
        scales = [page.param(n) * self.refs["unit"][self.head, n] for n in groups]
        return sum(x * scale[None] for x, scale in zip(products, scales, strict=True))


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
            "width": codec.allocation.width,
            "offset": stream_offsets(codec.allocation.width),
            "group": codec.allocation.group,
            "unit": lax.rsqrt(codec.allocation.size.astype(jnp.float32)),
            "levels": lloyd.level_table().reshape(-1).astype(jnp.float16),
        }
    return {name: value for name, value in operands.items() if value is not None}


def numbers_of(codec: Codec) -> Codec:
    """The codec's numbers alone: its arrays are operands."""
    if isinstance(codec, AffineCodec):
        return AffineCodec(codec.bits, codec.group, codec.step)
    return LloydCodec(codec.bits) if isinstance(codec, LloydCodec) else codec


def make_tiles(codec: Codec, refs: dict, channels: int, head, *, exact_query, interpret):
    """The reader of one side inside a kernel."""
    if isinstance(codec, AffineCodec):
        return AffineTiles(codec, channels, head, refs.get("centroids"), interpret=interpret)
    if isinstance(codec, LloydCodec):
        if "width" in refs:
            return StreamTiles(channels, head, refs)
        return LevelTiles(codec, channels, interpret=interpret)
    return FloatTiles(channels, exact_query=exact_query)
