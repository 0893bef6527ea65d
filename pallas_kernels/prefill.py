"""prefill: attention of a chunk of new tokens over itself and over stored tokens, on a GPU.

A chunk attends to itself by cuDNN's fused attention. Stored tokens are decoded into float16, once
for all queries of the chunk, and go through the same fused attention. Memory is bounded: a long
prefix is decoded a block at a time, and blocks are merged by their lse.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkvq.pallas_kernels.cudnn import fused_attention
from jkvq.pallas_kernels.formats.codecs import Codec
from jkvq.pallas_kernels.formats.packed import LayerIndex, Packed
from jkvq.pallas_kernels.reference.merge import merge
from jkvq.pallas_kernels.reference.paged_attention import load_pages

_BLOCK = 2**27  # numbers held at once: decoded keys and values, or scores where XLA makes them

# Which attention serves: cuDNN on a GPU; XLA's, in float32, elsewhere.
Fused = Literal["cudnn", "xla"]


def self_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    fused: Fused,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """(out, lse) in float32 of a chunk over itself: each token sees itself and those before it."""
    q, k, v = (x.astype(_narrow(fused)) for x in (q, k, v))
    return _fused(q, k, v, scale=scale, fused=fused, causal=True)


class ExactTokens(NamedTuple):
    """Stored tokens that are not in packed pages, side by side; the first ``count`` are real."""

    key: Float[Array, "B W K H"]
    value: Float[Array, "B W K H"]
    count: Int[Array, " B"]


def prefix_attention(
    q: Float[Array, "B T N H"],
    keys: Packed,
    values: Packed,
    key_codec: Codec,
    value_codec: Codec,
    layer: LayerIndex,
    block_table: Int[Array, "B M"],
    length: Int[Array, " B"],
    mean: Float[Array, "M K H"] | None = None,
    exact: ExactTokens | None = None,
    *,
    scale: float,
    fused: Fused,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """(out, lse) in float32 over the first ``length[b]`` packed tokens of sequence b.

    ``mean`` is what the keys of each page are stored without. Exact tokens, which all queries see
    too, take their place behind the packed ones: one product serves both.
    """
    B, T, N, H = q.shape
    K, p = keys.kv_heads, keys.page
    total = length if exact is None else length + exact.count
    columns = block_table.shape[1] + (0 if exact is None else -(-exact.key.shape[1] // p))
    token_size = 2 * K * H if fused == "cudnn" else N * T
    pages = max(1, min(_BLOCK // (B * token_size * p), columns))
    padding = 0, columns + -columns % pages - block_table.shape[1]
    block_table = jnp.pad(block_table, ((0, 0), padding))
    if mean is not None:
        mean = jnp.pad(mean, (padding, (0, 0), (0, 0)))
    narrow = _narrow(fused)
    q = q.astype(narrow)

    def attend_block(i):
        ids = jax.lax.dynamic_slice_in_dim(block_table, i * pages, pages, axis=1)
        packed = i * pages * p + jnp.arange(pages * p)[None] < length[:, None]
        k, v = (
            codec.decode(load_pages(side, layer, ids), packed)
            for side, codec in ((keys, key_codec), (values, value_codec))
        )
        if mean is not None:
            each = jax.lax.dynamic_slice_in_dim(mean, i * pages, pages, axis=0)
            k = k + jnp.repeat(each, p, axis=0)[None]
        k, v = (x.astype(narrow) for x in (k, v))
        if exact is not None:
            k, v = (
                _put_behind(x, tokens, exact.count, length - i * pages * p)
                for x, tokens in ((k, exact.key), (v, exact.value))
            )
        count = jnp.clip(total - i * pages * p, 0, pages * p)
        some = jnp.maximum(count, 1)  # a query must see something; it is left out below
        part = _fused(q, k, v, scale=scale, fused=fused, lengths=some)
        return _only_where(count > 0, *part)

    if pages == columns:  # no loop: a GPU asks its host before every round of one
        return attend_block(0)
    empty = jnp.zeros((B, T, N, H)), jnp.full((B, T, N), -jnp.inf)
    blocks = -(-total.max() // (pages * p))
    return jax.lax.fori_loop(0, blocks, lambda i, sum: merge(*sum, *attend_block(i)), empty)


def _put_behind(
    packed: Float[Array, "B S K H"],
    tokens: Float[Array, "B W K H"],
    count: Int[Array, " B"],
    start: Int[Array, " B"],
) -> Float[Array, "B S K H"]:
    """Packed tokens with others from ``start`` on, where that is in the block."""
    row, place = jnp.arange(len(tokens))[:, None], jnp.arange(tokens.shape[1])[None]
    at = jnp.where(place < count[:, None], start[:, None] + place, -1)
    at = jnp.where(at >= 0, at, packed.shape[1])  # past the end, where nothing is written
    return packed.at[row, at].set(tokens.astype(packed.dtype), mode="drop")


def _narrow(fused: Fused):
    """What attention takes is rounded to this: finer than bfloat16, and queries are one array."""
    return jnp.float16 if fused == "cudnn" else jnp.float32


def _only_where(some: Bool[Array, " B"], out, lse):
    """(0, -inf) for the sequences that see nothing."""
    some = some[:, None, None]
    return jnp.where(some[..., None], out, 0.0), jnp.where(some, lse, -jnp.inf)


def _fused(q, k, v, *, scale: float, fused: Fused, causal=False, lengths=None):
    if fused == "cudnn":
        return fused_attention(q, k, v, scale=scale, causal=causal, lengths=lengths)
    with jax.default_matmul_precision("highest"):  # no TF32
        return jax.nn.dot_product_attention(
            *(q, k, v),
            scale=scale,
            is_causal=causal,
            key_value_seq_lengths=lengths,
            implementation="xla",
            return_residual=True,
        )
