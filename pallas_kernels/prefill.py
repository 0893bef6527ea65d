"""prefill: attention of a chunk of new tokens over itself and over stored tokens, on a GPU.

A chunk attends to itself by cuDNN's fused attention. Stored tokens are decoded a block at a time
into float16, a block for all queries of the chunk, and go through the same fused attention; blocks
are merged by their lse. Memory holds one block of decoded tokens, whatever the prefix.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkvq.pallas_kernels.cudnn import fused_attention
from jkvq.pallas_kernels.formats.codecs import Codec
from jkvq.pallas_kernels.formats.packed import LayerIndex, Packed
from jkvq.pallas_kernels.reference.merge import merge
from jkvq.pallas_kernels.reference.paged_attention import load_pages

_BLOCK = 8192  # tokens decoded at once, over all sequences

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
    return _fused(q, k, v, scale=scale, fused=fused, causal=True)


def exact_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    seen: Bool[Array, "B S"],
    *,
    scale: float,
    fused: Fused,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """(out, lse) in float32 over exact tokens, of which all queries see the same.

    What is not seen may be anything.
    """
    real, narrow = seen[..., None, None], _narrow(fused)
    q, k, v = (x.astype(narrow) for x in (q, jnp.where(real, k, 0), jnp.where(real, v, 0)))
    mask = jnp.broadcast_to(seen[:, None, None], (len(seen), 1, q.shape[1], seen.shape[1]))
    out, lse = _fused(q, k, v, scale=scale, fused=fused, mask=mask)
    return _only_where(seen.any(1), out, lse)


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
    *,
    scale: float,
    fused: Fused,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """(out, lse) in float32 over the first ``length[b]`` stored tokens of sequence b.

    ``mean`` is what the keys of each page are stored without.
    """
    B, T, N, H = q.shape
    p = keys.page
    pages = max(1, min(_BLOCK // B // p, block_table.shape[1]))
    padding = 0, -block_table.shape[1] % pages
    block_table = jnp.pad(block_table, ((0, 0), padding))
    if mean is not None:
        mean = jnp.pad(mean, (padding, (0, 0), (0, 0)))
    narrow = _narrow(fused)
    q = q.astype(narrow)

    def one_block(i, carry):
        ids = jax.lax.dynamic_slice_in_dim(block_table, i * pages, pages, axis=1)
        count = jnp.clip(length - i * pages * p, 0, pages * p)
        real = jnp.arange(pages * p)[None] < count[:, None]
        k, v = (
            codec.decode(load_pages(side, layer, ids), real)
            for side, codec in ((keys, key_codec), (values, value_codec))
        )
        if mean is not None:
            each = jax.lax.dynamic_slice_in_dim(mean, i * pages, pages, axis=0)
            k = k + jnp.repeat(each, p, axis=0)[None]
        k, v = (x.astype(narrow) for x in (k, v))
        some = jnp.maximum(count, 1)  # a query must see something; it is left out below
        part = _fused(q, k, v, scale=scale, fused=fused, lengths=some)
        return merge(*carry, *_only_where(count > 0, *part))

    blocks = -(-length.max() // (pages * p))
    empty = jnp.zeros((B, T, N, H)), jnp.full((B, T, N), -jnp.inf)
    return jax.lax.fori_loop(0, blocks, one_block, empty)


def _narrow(fused: Fused):
    """What decoded tokens and turned queries are rounded to: finer than bfloat16."""
    return jnp.float16 if fused == "cudnn" else jnp.float32


def _only_where(some: Bool[Array, " B"], out, lse):
    """(0, -inf) for the sequences that see nothing."""
    some = some[:, None, None]
    return jnp.where(some[..., None], out, 0.0), jnp.where(some, lse, -jnp.inf)


def _fused(q, k, v, *, scale: float, fused: Fused, causal=False, mask=None, lengths=None):
    if fused == "cudnn":
        return fused_attention(q, k, v, scale=scale, causal=causal, mask=mask, lengths=lengths)
    with jax.default_matmul_precision("highest"):  # no TF32
        return jax.nn.dot_product_attention(
            *(x.astype(jnp.float32) for x in (q, k, v)),
            mask=mask,
            scale=scale,
            is_causal=causal,
            key_value_seq_lengths=lengths,
            implementation="xla",
            return_residual=True,
        )
