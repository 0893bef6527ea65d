"""What the ops take and give, whichever backend runs them. Importing this loads no kernel."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float16, Int

from jkvq.pallas_kernels.formats.codecs import Codec
from jkvq.pallas_kernels.formats.packed import LayerIndex, Packed
from jkvq.pallas_kernels.norm import rms_norm
from jkvq.pallas_kernels.rotary import rotate

# "reference": plain JAX, in float32, on any device.
# "pallas": the kernels, on an NVIDIA GPU of compute capability 8 or more.
# "triton", "mosaic": the same by one compiler, mosaic on Hopper where it can; pallas takes the
#     faster one.
# "interpret": the kernels' own steps, one by one, on any device: for tests.
Implementation = Literal["reference", "pallas", "triton", "mosaic", "interpret"]
COMPILED = ("pallas", "triton", "mosaic")  # those that need a GPU


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unsummed:
    """A product with weights, as its kernel left it: to be summed where it is loaded next.

    parts: whose sum it is; bias: to be added to the last axes, if there is one.
    dtype: of the sum.
    """

    parts: Float[Array, "parts *rows D"]
    bias: Float[Array, "..."] | None
    dtype: jnp.dtype = field(metadata={"static": True})

    @classmethod
    def of(cls, x: Float[Array, "*rows D"]) -> "Unsummed":
        """What is a sum already."""
        return cls(x[None], None, x.dtype)

    def in_heads(self, channels: int) -> "Unsummed":
        """The same with the last axis cut into heads."""
        return jax.tree.map(lambda x: x.reshape(*x.shape[:-1], -1, channels), self)

    @property
    def total(self) -> Float[Array, "*rows D"]:
        y = self.parts[0] if len(self.parts) == 1 else self.parts.sum(0)
        if self.bias is not None:
            y = y + jnp.expand_dims(self.bias.astype(y.dtype), range(y.ndim - self.bias.ndim))
        return y.astype(self.dtype)


class Heads(NamedTuple):
    """The heads of a layer's attention."""

    kv: int
    group: int  # query heads of each
    channels: int


@dataclass(frozen=True)
class DecodeSettings:
    """How a decode kernel runs.

    programs: in all, about as many as run at once.
    warps: of a program.
    stages: tiles that a program loads ahead.
    """

    programs: int
    warps: int
    stages: int


@dataclass(frozen=True)
class WriteSettings:
    """How a write kernel runs.

    tokens: of a program.
    warps: of a program.
    """

    tokens: int
    warps: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenTransform:
    """What happens to a token before it is coded: x -> (x - mean) R; None leaves a part out.

    The arrays are those of all layers and KV heads, and ``layer`` says whose are meant, so that
    nothing is sliced layer by layer. Rotations repeat: layer i and head j have
    rotation[i % l, j % k], and one matrix for all is l = k = 1.

    angles: of the rotary position at which each token's mean stands: cos, and sin with a minus in
        the first half of a head, where the second channel of a pair is added to the first. None is
        a mean that has no position.
    rotation: its columns in the order in which the codec stores channels.
    dual: R^-T, by which queries are multiplied to meet such tokens; R itself if it is orthogonal.
    """

    mean: Float[Array, "L K H"] | None = None
    angles: tuple[Float16[Array, "B T H"], Float16[Array, "B T H"]] | None = None
    rotation: Float16[Array, "l k H H"] | None = None
    dual: Float16[Array, "l k H H"] | None = None
    layer: LayerIndex = 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadNorm:
    """The norm of a head's channels (norm.py)."""

    weight: Float[Array, " H"]
    eps: float = field(metadata={"static": True})
    of_one: bool = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NewHeads:
    """Heads of new tokens as the product with their weights left them, among those of others.

    A kernel that loads them can do the rest; ``finished`` does it in plain JAX.

    joined: [B, T, n, H], of which ``count`` heads are meant, from ``first`` on.
    norm, rotary: what is still to be done to each, in this order; rotary are cos and sin.
    """

    joined: Unsummed
    first: int = field(metadata={"static": True})
    count: int = field(metadata={"static": True})
    norm: HeadNorm | None = None
    rotary: tuple[Float[Array, "B T H/2"], Float[Array, "B T H/2"]] | None = None

    @classmethod
    def of(cls, heads: Float[Array, "B T n H"]) -> "NewHeads":
        """Those that are finished."""
        return cls(Unsummed.of(heads), 0, heads.shape[2])

    @property
    def finished(self) -> Float[Array, "B T count H"]:
        x = self.joined.total[:, :, self.first : self.first + self.count]
        if self.norm is not None:
            x = rms_norm(x, self.norm.weight, self.norm.eps, of_one=self.norm.of_one)
        return x if self.rotary is None else rotate(x, *self.rotary)


class Queries(NamedTuple):
    """New queries as they meet the cache.

    rotated: what meets stored keys.
    means: what meets the turns of pages (`Shift`), where keys are stored without their mean.
    """

    rotated: Float[Array, "B T N H"]
    means: Float[Array, "B T N H"] | None


@dataclass(frozen=True)
class InPages:
    """Tokens that lie in pages already, of float16 numbers or codes: token (b, t) in page, slot."""

    pages: Packed
    codec: Codec
    page: Int[Array, "B T"]
    slot: Int[Array, "B T"]


@dataclass(frozen=True)
class WriteSide:
    """One side, keys or values, of ``write``: its pages, new tokens and what is done to them."""

    pages: Packed
    tokens: NewHeads | InPages
    codec: Codec
    transform: TokenTransform = TokenTransform()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shift:
    """What is added to q . k: the same for all tokens that share a number.

    It is q . mean, with a mean that stands where the number says: queries . turns (rotary.py).

    queries: numbers of each query head; turns: as many of each place.
    number: of each slot of a sequence's pages; None counts the pages, from ``first`` on.
    """

    queries: Float[Array, "B N H"]
    turns: Float16[Array, "P H"]
    number: Int[Array, "B slots"] | None = None
    first: int = field(default=0, metadata={"static": True})

    @property
    def scores(self) -> Float[Array, "B N P"]:
        """All of them."""
        turns = self.turns.astype(jnp.float32)
        return jnp.einsum("bnh,ph->bnp", self.queries, turns, precision="highest")
