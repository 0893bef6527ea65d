"""What a query reads of a cache, computed without one: the numbers that come back, not the bytes.

The evaluation measures with it layer by layer, and runs caches with it that have no storage here
(baselines.py). It holds whole keys and values and computes in float32: it saves nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkvq.cache.basis import Basis, SideBasis
from jkvq.cache.exact_pages import rounded, window_codec
from jkvq.cache.specs.spec import CacheSpec
from jkvq.pallas_kernels.formats.codecs import Codec
from jkvq.pallas_kernels.formats.packed import LayerIndex
from jkvq.pallas_kernels.reference.dense_attention import causal, products, softmax, weighted_sum

_BLOCK = 128  # queries at a time

Tokens = Float[Array, "S K H"]


class LayerReconstruction(Protocol):
    """What one layer gives back of one sequence. A pytree, so that compiled code can take it."""

    def coded(self, k: Tokens, v: Tokens) -> tuple[Tokens, Tokens]:
        """Keys and values of tokens 0 to S - 1 as their codes give them back."""
        ...

    def windowed(self, k: Tokens, v: Tokens) -> tuple[Tokens, Tokens]:
        """The same as a window or a 16-bit buffer gives them back."""
        ...

    def reads_coded(
        self, position: Int[Array, " T"], tokens: int
    ) -> tuple[Bool[Array, "T S"], Bool[Array, "T S"]]:
        """Which of the tokens before it a query reads as coded: of the keys, of the values."""
        ...


class Reconstruction(Protocol):
    """What a cache gives back."""

    def layer(self, index: int) -> LayerReconstruction: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenWiseLayer:
    """A layer of a cache that codes each token by itself."""

    key: SideBasis
    value: SideBasis
    layer: LayerIndex
    spec: CacheSpec = field(metadata={"static": True})

    def coded(self, k, v):
        def code(side: SideBasis, window: Codec, x):
            if self.spec.windowed:  # what is coded is what the window had
                x = rounded(window, x)
            return rounded(side.codec(self.layer), x)

        return self._through(k, v, code)

    def windowed(self, k, v):
        return self._through(k, v, lambda _, window, x: rounded(window, x))

    def reads_coded(self, position, tokens):
        packed = self.spec.reads_packed(position[:, None], jnp.arange(tokens)[None])
        return packed, packed

    def _through(self, k, v, change):
        """Keys and values taken to the basis of the cache, changed there, and taken back."""
        middle = self.spec.middle(jnp.arange(len(k))[None])

        def through(side: SideBasis, window: Codec, x):
            at, layer = side.angles(middle), self.layer
            x = change(side, window, side.enter(x.astype(jnp.float32)[None], layer, at))
            x = side.leave(x, layer)
            return (x if side.mean is None else x + side.mean_at(layer, at))[0]

        key, value = map(window_codec, self.spec.window_sides)
        return through(self.key, key, k), through(self.value, value, v)


@dataclass(frozen=True)
class TokenWise:
    """A cache of this package; ``basis`` as `llm.checked_basis` gives it, values not folded."""

    spec: CacheSpec
    basis: Basis

    def layer(self, index: int) -> TokenWiseLayer:
        return TokenWiseLayer(*self.basis.layer(index), index, self.spec.of_layer(index))


def scores(
    q: Float[Array, "T N H"], windowed: Tokens, coded: Tokens, reads_coded: Bool[Array, "T S"]
) -> Float[Array, "K G T S"]:
    """q . k of every pair, not scaled; k as coded where ``reads_coded``, else as windowed."""
    return jnp.where(reads_coded[None, None], products(q, coded), products(q, windowed))


def mix(
    weights: Float[Array, "K G T S"],
    windowed: Tokens,
    coded: Tokens,
    reads_coded: Bool[Array, "T S"],
) -> Float[Array, "T N H"]:
    """The weighted sum of v; v as coded where ``reads_coded``, else as windowed."""
    on_coded = jnp.where(reads_coded[None, None], weights, 0.0)
    return weighted_sum(on_coded, coded) + weighted_sum(weights - on_coded, windowed)


def in_blocks(
    change: Callable[[Float[Array, "t N H"], Int[Array, " t"]], Any],
    q: Float[Array, "T N H"],
    position: Int[Array, " T"],
) -> Any:
    """``change`` of the queries, so many at a time, stacked; the last block ends in padding.

    Padding has positions past every token.
    """
    size = min(_BLOCK, len(q))
    count = -(-len(q) // size)
    padding = (0, count * size - len(q))
    q = jnp.pad(q, (padding, (0, 0), (0, 0))).reshape(count, size, *q.shape[1:])
    position = jnp.pad(position, padding, constant_values=2**30).reshape(count, size)
    return jax.lax.map(lambda block: change(*block), (q, position))


def attend_reconstructed(
    layer: LayerReconstruction,
    q: Float[Array, "T N H"],
    k: Tokens,
    v: Tokens,
    position: Int[Array, " T"],
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "T N H"]:
    """Attention of queries over tokens 0 to S - 1, each query reading them as the cache would."""
    keys, values = zip(layer.windowed(k, v), layer.coded(k, v), strict=True)

    def attend(q, position):
        key_coded, value_coded = layer.reads_coded(position, len(k))
        logits = scale * scores(q, *keys, key_coded)
        weights, _ = softmax(logits, causal(position, len(k), window), sinks)
        return mix(weights, *values, value_coded)

    return in_blocks(attend, q, position).reshape(-1, *q.shape[1:])[: len(q)]
