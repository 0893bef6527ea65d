"""The numbers that a decode kernel for Hopper is compiled for: formats, teams of warps, tiles."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp

from jkvq.pallas_kernels.formats.codecs import AffineCodec, Codec, DigitCodec, FloatCodec
from jkvq.pallas_kernels.mosaic.sides.affine_keys import AffineKeys, AffineValues, parts_of
from jkvq.pallas_kernels.mosaic.sides.floats import FloatKeys, FloatValues, kind_of
from jkvq.pallas_kernels.mosaic.ring import Side
from jkvq.pallas_kernels.mosaic.tile import HEADS, Tile
from jkvq.pallas_kernels.types import Heads, Shift

WARPS = 4  # of a warpgroup
SLOTS = 2  # of a ring; more in flight is slower
_TILE_BYTES = 36 * 1024  # of a slot at most, if tokens are not fewer than 16 then
_SHARED_BYTES = 220 * 1024  # of a block


def reads(codec: Codec, channels: int) -> bool:
    """Whether this kernel reads pages of a codec."""
    if isinstance(codec, FloatCodec):
        return codec.floats != jnp.float32
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

    digits: of the channels' quarters, of keys of unequal widths (digits.py).
    """

    channels: int
    bits: int = 16
    kind: str | None = None
    digits: tuple[int, ...] | None = None

    @classmethod
    def of(cls, codec: Codec, channels: int) -> "Format":
        if isinstance(codec, FloatCodec):
            return cls(channels, kind=kind_of(codec.floats))
        assert isinstance(codec, AffineCodec | DigitCodec)
        return cls(channels, codec.bits, digits=getattr(codec, "digits", None))

    @property
    def coded(self) -> bool:
        return self.kind is None

    @property
    def row(self) -> int:
        """Bytes of a token, without its params."""
        return self.channels * self.bits // 8

    @property
    def bytes(self) -> int:
        """Bytes of a token."""
        return self.row + 4 * self.coded

    def keys(self, tile: Tile) -> AffineKeys | FloatKeys:
        if self.kind is not None:
            return FloatKeys(tile, self.kind, self.channels)
        return AffineKeys(tile, self.bits, self.channels, self.digits)

    def values(self, tile: Tile) -> AffineValues | FloatValues:
        if self.kind is not None:
            return FloatValues(tile, self.kind, self.channels)
        return AffineValues(tile, self.bits, self.channels)


def share_count(codecs: tuple[Codec, Codec], heads: Heads, page: int, cores: int) -> int:
    """Shares of the work, if all multiprocessors have one block."""
    token_bytes = sum(Format.of(codec, heads.channels).bytes for codec in codecs)
    teams = make_teams(heads, page, token_bytes)
    return max(1, cores * teams.count * teams.heads // heads.kv)


class ShiftNumbers(NamedTuple):
    """What is added to scores: so many numbers for a query head.

    first: that of the first page; slots: of a sequence that say which is theirs, if they do.
    """

    numbers: int
    first: int
    slots: int

    @classmethod
    def of(cls, shift: Shift) -> "ShiftNumbers":
        slots = 0 if shift.number is None else shift.number.shape[1]
        return cls(shift.scores.shape[2], shift.first, slots)


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

    @property
    def sides(self) -> list[Side]:
        """Keys and values, with the numbers of their arrays."""
        first = 1 + self.key.coded
        values = (first, first + 1)[: 1 + self.value.coded]
        return [
            Side((0, 1)[:first], self.key.row, 2 * self.key.coded),
            Side(values, self.value.row, 2 * self.value.coded),
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
