"""paged_attention: attention of query tokens over tokens stored in pages.

out[b, t] = sum_s softmax_s(scale * q[b, t] . k[s]) v[s] over the first length[b, t] stored tokens
of sequence b, in float32. Decode asks with one query per sequence, prefill with a chunk of them.

The loop runs over blocks of pages with a running softmax and ends at the longest sequence of the
batch: neither memory nor time grows with the width of the block table.
"""

from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkvq.pallas_kernels.formats.packed import LayerIndex, Packed

_BLOCK = 512  # tokens per round of the loop


class Decoder(Protocol):
    """Reads packed tokens [B, S, K, ...]; what stands where ``real`` is false may be anything."""

    def dot(
        self, q: Float[Array, "B T K G H"], tokens: Packed, real: Bool[Array, "B S"]
    ) -> Float[Array, "B T K G S"]:
        """q . x^ of every token, finite where it is real."""
        ...

    def mix(
        self, weights: Float[Array, "B T K G S"], tokens: Packed, real: Bool[Array, "B S"]
    ) -> Float[Array, "B T K G H"]:
        """The sum of x^ with these weights, which are 0 where a token is not real."""
        ...


def paged_attention(
    q: Float[Array, "B T N H"],
    keys: Packed,
    values: Packed,
    key_decoder: Decoder,
    value_decoder: Decoder,
    layer: LayerIndex,
    block_table: Int[Array, "B M"],
    length: Int[Array, "B T"],
    shift: Float[Array, "B T N M"] | None = None,
    *,
    scale: float,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """(out, lse) in float32; a query that sees no token gets (0, -inf).

    ``shift`` is added to q . k for all tokens of a page.
    Slots at and past ``length``, and pages the block table does not name, may hold anything.
    """
    B, T, N, H = q.shape
    K, p = keys.kv_heads, keys.page
    G = N // K
    round_pages = max(1, min(_BLOCK // p, block_table.shape[1]))
    padding = 0, -block_table.shape[1] % round_pages
    block_table = jnp.pad(block_table, ((0, 0), padding))
    if shift is not None:
        shift = jnp.pad(shift * scale, (*[(0, 0)] * 3, padding)).reshape(B, T, K, G, -1)
    q = q.astype(jnp.float32).reshape(B, T, K, G, H) * scale

    def one_round(i, carry):
        top, total, acc = carry
        pages = jax.lax.dynamic_slice_in_dim(block_table, i * round_pages, round_pages, axis=1)
        token = i * round_pages * p + jnp.arange(round_pages * p)  # [S], S tokens this round
        visible = token[None, None] < length[..., None]  # [B, T, S]
        real = visible.any(1)
        scores = key_decoder.dot(q, load_pages(keys, layer, pages), real)
        if shift is not None:
            each = jax.lax.dynamic_slice_in_dim(shift, i * round_pages, round_pages, axis=-1)
            scores += jnp.repeat(each, p, axis=-1)
        scores = jnp.where(visible[:, :, None, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(-1))
        base = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
        weights = jnp.exp(scores - base[..., None])
        decay = jnp.exp(top - base)
        total = total * decay + weights.sum(-1)
        new = value_decoder.mix(weights, load_pages(values, layer, pages), real)
        return new_top, total, acc * decay[..., None] + new

    rounds = -(-length.max() // (round_pages * p))
    empty = jnp.full((B, T, K, G), -jnp.inf), jnp.zeros((B, T, K, G)), jnp.zeros((B, T, K, G, H))
    top, total, acc = jax.lax.fori_loop(0, rounds, one_round, empty)
    out = acc / jnp.where(total > 0, total, 1.0)[..., None]
    lse = jnp.log(total) + jnp.where(jnp.isneginf(top), 0.0, top)
    return out.reshape(B, T, N, H), lse.reshape(B, T, N)


def load_pages(pages: Packed, layer: LayerIndex, ids: Int[Array, "B n"]) -> Packed:
    """The tokens of some pages of one layer, in a row [B, S, ...]."""

    def gather(array, token_axis: int):  # [L, P, ...] -> [B, n, ...] -> tokens beside their pages
        tile = array.at[layer, ids].get(mode="promise_in_bounds")
        tile = jnp.moveaxis(tile, token_axis, 2)
        return tile.reshape(tile.shape[0], -1, *tile.shape[3:])

    return Packed(
        gather(pages.codes, 4 if pages.stream else 3),
        None if pages.params is None else gather(pages.params, 4),
        None if pages.index is None else gather(pages.index, 2),
        pages.stream,
    )
