"""How kernels read stored tokens: as tiles that go straight into matrix products.

Codes are never converted to floats: or-ing a code into the mantissa of 1024 makes the float16
number 1024 + w c, with w the place of its bits in the byte, and subtracting 1024 leaves w c. The
weight w is taken out of q, or of the sum over p. (Leaving the 1024 in, to take it out of the sums,
is one instruction less but failed the tests' bounds: tensor cores seem to add with too few bits.)

Each class below reads one side of the cache in one format: ``query`` and ``scores`` for keys,
``zero``, ``add`` and ``finish`` for values.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plt

from jkvq.pallas_kernels import lloyd
from jkvq.pallas_kernels.codecs import AffineCodec, Codec, LloydCodec
from jkvq.pallas_kernels.packed import Packed
from jkvq.pallas_kernels.packing import WORD, part_widths, stream_offsets

ROWS = 16  # of a matrix product, the least a tensor core takes: query heads, filled up
_MAGIC = 0x6400  # 1024 in float16
_NARROWEST = 16  # channels that a matrix product takes at least
_STREAM_PIECE = 32  # channels of a stream that are looked up at once


class Piece(NamedTuple):
    """Neighbouring channels whose codes come out of their words with one mask."""

    start: int  # channel
    width: int  # channels
    group: int  # that they share scale and lo with
    word: int  # where their words begin
    words: int  # how many; the channels go round them several times if they are fewer
    shift: int  # 0 or 8: the byte of the word
    place: int  # of the first channel's bits in that byte
    bits: int
    worth: int  # of a code's unit: 4 for the third bit

    @property
    def wrap(self) -> int | None:
        return self.words if self.words < self.width else None


def pieces(bits: int, channels: int, group: int) -> list[list[Piece]]:
    """For each part of a code the pieces that make up a head, the same channels in every part."""
    found = []
    width = max(_NARROWEST, *(min(channels * part // WORD, group) for part in part_widths(bits)))
    offset = worth = 0
    for part in part_widths(bits):
        words = channels * part // WORD
        found.append(
            [
                Piece(
                    start=start,
                    width=width,
                    group=start // group,
                    word=offset + start % words,
                    words=min(words, width),
                    shift=start // words * part // 8 * 8,
                    place=start // words * part % 8,
                    bits=part,
                    worth=1 << worth,
                )
                for start in range(0, channels, width)
            ]
        )
        offset, worth = offset + words, worth + part
    return found


def code_tile(words, piece: Piece, *, interpret: bool):
    """The codes of a piece as float16 numbers weight * code, from its words [p, width]."""
    mask = _mask(piece)
    if interpret:
        bits = ((words >> piece.shift) & mask) | _MAGIC
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16) - jnp.float16(1024)
    args, operand, constraints = [words], "$2", "=r,r,r"
    if isinstance(mask, int):
        operand, constraints = hex(mask * 0x10001), "=r,r"
    else:
        args.append(jnp.broadcast_to(mask, words.shape))
    # Two words a register: ((words >> shift) & mask | magic) - 1024
    asm = f"""{{
        .reg .b32 t, m;
        shr.b32 t, $1, {piece.shift};
        lop3.b32 t, t, {operand}, {hex(_MAGIC * 0x10001)}, 0xEA;
        mov.b32 m, {hex((_MAGIC | 0x8000) * 0x10001)};
        add.f16x2 $0, t, m;
    }}"""
    (tile,) = plt.elementwise_inline_asm(
        asm,
        args=args,
        constraints=constraints,
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.float16)],
    )
    return tile


def _place(piece: Piece):
    """Where each channel's bits begin in the byte: a number, or one for each column."""
    if piece.wrap is None:
        return piece.place
    turn = lax.broadcasted_iota(jnp.int32, (1, piece.width), 1) // piece.words
    return piece.place + piece.bits * turn


def _mask(piece: Piece):
    place = _place(piece)
    ones = (1 << piece.bits) - 1
    if isinstance(place, int):
        return ones << place
    return jnp.left_shift(jnp.int32(ones), place).astype(jnp.uint16)


def _weight(piece: Piece):
    """What a code's unit counts in a tile: a number, or one for each column, [1, width]."""
    place = _place(piece)
    if isinstance(place, int):
        return float(1 << place)
    return jnp.left_shift(jnp.int32(1), place).astype(jnp.float32)


def level_tile(words: list, parts: list[Piece], *, interpret: bool):
    """The Lloyd-Max levels of a piece in float16, from the words of each part of its codes."""
    bits = sum(part.bits for part in parts)
    levels = np.asarray(lloyd.gaussian_levels(bits), np.float16).view(np.uint16)
    if interpret:
        codes, shift = jnp.int32(0), 0
        for tile, part in zip(words, parts, strict=True):
            low = (tile.astype(jnp.int32) >> (part.shift + _place(part))) & ((1 << part.bits) - 1)
            codes, shift = codes | (low << shift), shift + part.bits
        found = jnp.zeros(codes.shape, jnp.uint16)
        for code, level in enumerate(levels.tolist()):
            found = jnp.where(codes == code, jnp.uint16(level), found)
        return lax.bitcast_convert_type(found, jnp.float16)
    return _looked_up(words, parts, levels)


def _looked_up(words: list, parts: list[Piece], levels: np.ndarray):
    """``level_tile`` by byte permutations, which look four codes up at once in eight bytes.

    Levels are odd: code c has the sign of its top bit and one of 2^(bits - 1) magnitudes.
    """
    half = len(levels) // 2
    magnitudes = np.resize(levels[half:], 8)  # of the positive ones, ascending
    table = [
        hex(int.from_bytes(byte[i : i + 4].astype(np.uint8).tobytes(), "little"))
        for byte in (magnitudes & 0xFF, magnitudes >> 8)
        for i in (0, 4)
    ]
    args, lines = [], []

    def operand(tile) -> int:
        args.append(tile)
        return 2 * len(args)  # the first of its two registers

    sources = []
    for tile, part in zip(words, parts, strict=True):
        place = None
        if part.wrap is not None:  # it differs by column, but not within a register
            columns = jnp.broadcast_to(_place(part) + part.shift, tile.shape)
            place = operand(columns.astype(jnp.uint16))
        sources.append((operand(tile), place, part))
    for j in range(2):
        lines.append(f"mov.b32 c{j}, 0;")
        shift = 0
        for register, place, part in sources:
            amount = part.shift + part.place
            if place is not None:
                lines.append(f"and.b32 u, ${place + j}, 0xFFFF;")
                amount = "u"
            lines += [
                f"shr.b32 t, ${register + j}, {amount};",
                f"and.b32 t, t, {hex(((1 << part.bits) - 1) * 0x10001)};",
                f"shl.b32 t, t, {shift};",
                f"or.b32 c{j}, c{j}, t;",
            ]
            shift += part.bits
        lines += [
            # n is half where the level is negative; such codes are mirrored, c ^ (half - 1)
            f"not.b32 t, c{j};",
            f"and.b32 n{j}, t, {hex(half * 0x10001)};",
            f"shr.b32 t, n{j}, {half.bit_length() - 1};",
            f"sub.u32 t, n{j}, t;",
            f"xor.b32 c{j}, c{j}, t;",
            f"and.b32 c{j}, c{j}, {hex((half - 1) * 0x10001)};",
            f"shl.b32 n{j}, n{j}, {16 - half.bit_length()};",  # to the sign
            f"shr.b32 t, c{j}, 12;",  # both codes into one byte
            f"or.b32 c{j}, c{j}, t;",
            f"and.b32 c{j}, c{j}, 0xFF;",
        ]
    lines += [
        "shl.b32 t, c1, 8;",
        "or.b32 c0, c0, t;",
        f"mov.b32 t, {table[0]};",
        f"mov.b32 u, {table[1]};",
        "prmt.b32 t, t, u, c0;",  # four low bytes
        f"mov.b32 u, {table[2]};",
        f"mov.b32 c1, {table[3]};",
        "prmt.b32 u, u, c1, c0;",  # four high bytes
        "prmt.b32 c0, t, u, 0x5140;",
        "prmt.b32 c1, t, u, 0x7362;",
        "xor.b32 $0, c0, n0;",
        "xor.b32 $1, c1, n1;",
    ]
    asm = "{ .reg .b32 t, u, c0, c1, n0, n1; " + " ".join(lines) + " }"
    (tile,) = plt.elementwise_inline_asm(
        asm,
        args=args,
        constraints=",".join(["=r", "=r"] + ["r"] * (2 * len(args))),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words[0].shape, jnp.float16)],
    )
    return tile


def dot(a, b, contract: tuple[int, int]):
    """A matrix product in float32."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


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
                parts[-1].append((q * (piece.worth / _weight(piece))).astype(jnp.float16))
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
                out = out + accs[i] * (top * part[i].worth / _weight(part[i]))
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


def codec_operands(pages: Packed, codec: Codec, heads: int, channels: int) -> dict:
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
