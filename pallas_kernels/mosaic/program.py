"""The numbers that a decode kernel for Hopper is compiled for: formats, teams of warps, tiles."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp

from jkvq.pallas_kernels.formats.codecs import (
    AffineCodec,
    Codec,
    DigitCodec,
    FloatCodec,
    LloydCodec,
)
from jkvq.pallas_kernels.mosaic.lanes import Value
from jkvq.pallas_kernels.mosaic.ring import Side
from jkvq.pallas_kernels.mosaic.sides import levels
from jkvq.pallas_kernels.mosaic.sides.affine_keys import AffineKeys
from jkvq.pallas_kernels.mosaic.sides.affine_values import AffineValues
from jkvq.pallas_kernels.mosaic.sides.floats import FloatKeys, FloatValues, kind_of
from jkvq.pallas_kernels.mosaic.sides.lloyd_keys import LloydKeys
from jkvq.pallas_kernels.mosaic.sides.lloyd_values import LloydValues
from jkvq.pallas_kernels.mosaic.sides.parts import parts_of
from jkvq.pallas_kernels.mosaic.sides.stream_keys import StreamKeys
from jkvq.pallas_kernels.mosaic.tile import HEADS, Tile
from jkvq.pallas_kernels.types import Heads, Shift

WARPS = 4  # of a warpgroup
SLOTS = 2  # of a ring; more in flight is slower
_TILE_BYTES = 36 * 1024  # of a slot at most, if tokens are not fewer than 16 then
STREAM_TILE = 64  # tokens of a tile and of a page with codes of unequal widths
_SHARED_BYTES = 220 * 1024  # of a block


def reads(codecs: tuple[Codec, Codec], heads: Heads, page: int) -> bool:
    """Whether this kernel reads pages of so many tokens, keys and values of these codecs."""
    if _is_stream(codecs[1]) or not all(_reads(codec, heads.channels) for codec in codecs):
        return False
    return not _is_stream(codecs[0]) or page == STREAM_TILE == _teams(codecs, heads, page).tile


def _is_stream(codec: Codec) -> bool:
    return isinstance(codec, LloydCodec) and codec.allocation is not None


def _reads(codec: Codec, channels: int) -> bool:
    if isinstance(codec, FloatCodec):
        return codec.floats != jnp.float32
    if isinstance(codec, LloydCodec):
        return codec.allocation is not None or codec.bits in levels.BITS
    if isinstance(codec, DigitCodec):
        codec = codec.columns
    if not isinstance(codec, AffineCodec) or codec.centroids is not None:
        return False
    whole = codec.group is None or codec.group == channels
    return whole and all(part.bytes >= 16 for part in parts_of(codec.bits, channels))


@dataclass(frozen=True)
class Teams:
    """How warps share the work, for heads and pages of some shape.

    heads: KV heads of a team; warps: of each of them.
    tile: tokens that are read at once.
    count: teams of a block.
    """

    heads: int
    warps: int
    tile: int
    count: int

    @property
    def size(self) -> int:
        """Warps of a team."""
        return self.heads * self.warps


def make_teams(of: Heads, page: int, token_bytes: int) -> Teams:
    """The teams for heads and pages of so many tokens.

    ``token_bytes`` are those of the keys and values of one head.
    """
    warps = next(n for n in (1, 2, 4) if n * HEADS >= of.group)
    heads = next(n for n in (4, 2, 1) if of.kv % n == 0 and n * warps <= WARPS)
    tiles = [tokens for tokens in (64, 32, 16) if page % tokens == 0]
    fits = (tokens for tokens in tiles if heads * tokens * token_bytes <= _TILE_BYTES)
    tile = next(fits, tiles[-1])
    slots = SLOTS * heads * tile * token_bytes
    warpgroups = min(3, max(1, _SHARED_BYTES * heads * warps // (WARPS * slots)))
    return Teams(heads, warps, tile, warpgroups * WARPS // (heads * warps))


@dataclass(frozen=True)
class Format:
    """How one side is stored: in codes of so many bits, or in floats of a kind.

    params: 16-bit numbers of a token besides: scale and lo of affine codes, units of Lloyd's.
    lloyd, stream: whether codes are Lloyd's, and of unequal widths.
    digits: of the channels' quarters, of keys of unequal widths (digits.py).
    """

    channels: int
    bits: int = 16
    params: int = 0
    kind: str | None = None
    lloyd: bool = False
    stream: bool = False
    digits: tuple[int, ...] | None = None

    @classmethod
    def of(cls, codec: Codec, channels: int) -> "Format":
        if isinstance(codec, FloatCodec):
            return cls(channels, kind=kind_of(codec.floats))
        if isinstance(codec, LloydCodec):
            if codec.allocation is None:
                return cls(channels, codec.bits, 1, lloyd=True)
            return cls(channels, codec.bits, codec.allocation.size.shape[-1], stream=True)
        assert isinstance(codec, AffineCodec | DigitCodec)
        return cls(channels, codec.bits, 2, digits=getattr(codec, "digits", None))

    @property
    def arrays(self) -> int:
        """Of pages: codes, and params if there are any."""
        return 1 + (self.params > 0)

    @property
    def row(self) -> int:
        """Bytes of a token, without its params."""
        return self.channels * self.bits // 8

    @property
    def bytes(self) -> int:
        """Bytes of a token."""
        return self.row + 2 * self.params

    def keys(
        self, tile: Tile, table: Value | None
    ) -> AffineKeys | FloatKeys | LloydKeys | StreamKeys:
        """``table``: of a stream's channels, of the warp's head."""
        if self.kind is not None:
            return FloatKeys(tile, self.kind, self.channels)
        if self.stream:
            return StreamKeys(tile, self.channels, table)
        if self.lloyd:
            return LloydKeys(tile, self.bits, self.channels)
        return AffineKeys(tile, self.bits, self.channels, self.digits)

    def values(self, tile: Tile) -> AffineValues | FloatValues | LloydValues:
        if self.kind is not None:
            return FloatValues(tile, self.kind, self.channels)
        if self.lloyd:
            return LloydValues(tile, self.bits, self.channels)
        return AffineValues(tile, self.bits, self.channels)


def share_count(codecs: tuple[Codec, Codec], heads: Heads, page: int, cores: int) -> int:
    """Shares of the work, if all multiprocessors have one block."""
    teams = _teams(codecs, heads, page)
    return max(1, cores * teams.count * teams.heads // heads.kv)


def tile_tokens(codecs: tuple[Codec, Codec], heads: Heads, page: int) -> int:
    """Tokens of a unit of the work, which is a tile."""
    return _teams(codecs, heads, page).tile


def _teams(codecs: tuple[Codec, Codec], heads: Heads, page: int) -> Teams:
    return make_teams(heads, page, sum(Format.of(codec, heads.channels).bytes for codec in codecs))


class ShiftNumbers(NamedTuple):
    """What is added to scores: there are so many turns.

    first: the turn of the first page; slots: of a sequence that say which is theirs, if they do.
    """

    turns: int
    first: int
    slots: int

    @classmethod
    def of(cls, shift: Shift) -> "ShiftNumbers":
        slots = 0 if shift.number is None else shift.number.shape[1]
        return cls(len(shift.turns), shift.first, slots)


@dataclass(frozen=True)
class Program:
    """The numbers that a kernel is compiled for."""

    key: Format
    value: Format
    teams: Teams
    shape: tuple[int, int, int, int]  # sequences, KV heads, query heads of each, channels
    pages: int  # of a layer
    page: int  # tokens
    shares: int
    scale: float  # of scores to base 2
    shift: ShiftNumbers | None
    bounded: bool = False  # whether sequences have tokens that are seen no more
    blocks: int = 0  # of the grid
    from_end: bool = False  # whether the grid's last team has the first share

    @property
    def sides(self) -> list[Side]:
        """Keys and values, with the numbers of their arrays."""
        keys, values = self.key.arrays, self.value.arrays
        return [
            Side(tuple(range(keys)), self.key.row, self.key.params),
            Side(tuple(range(keys, keys + values)), self.value.row, self.value.params),
        ]

    @property
    def slot_bytes(self) -> int:
        return self.teams.heads * sum(sum(side.bytes(self.teams.tile)) for side in self.sides)

    @property
    def tiles(self) -> int:
        """Of a page."""
        return self.page // self.teams.tile

    @property
    def groups(self) -> int:
        """Of KV heads, one for a team."""
        return self.shape[1] // self.teams.heads

    @property
    def warpgroups(self) -> int:
        """Of a block."""
        return self.teams.count * self.teams.size // WARPS

    @property
    def barrier_words(self) -> int:
        """Of the barriers and counts of a block's rings."""
        return 4 * SLOTS * self.teams.count

    @property
    def warpgroup_bytes(self) -> int:
        """Of the slots of a warpgroup's teams."""
        return WARPS // self.teams.size * SLOTS * self.slot_bytes


def same_threads(programs: list[Program]) -> list[Program]:
    """The programs with as many teams as run in blocks of one size."""
    warpgroups = min(program.warpgroups for program in programs)

    def fitted(program: Program) -> Program:
        count = warpgroups * WARPS // program.teams.size
        return replace(program, teams=replace(program.teams, count=count))

    return [fitted(program) for program in programs]


def shared_bytes(programs: list[Program]) -> int:
    """Of a block that runs programs one after the other, its warpgroups each at their own pace."""
    return programs[0].warpgroups * max(program.warpgroup_bytes for program in programs)
