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

_BLOCK, _SMALL_BLOCK = 512, 128  # tokens per round of the loop: of a chunk, of one query


class Decoder(Protocol):
    """Reads packed tokens [B, S, K, ...]; what stands where ``real`` is false may be anything."""

    def decode(self, tokens: Packed, real: Bool[Array, "B S"]) -> Float[Array, "B S K H"]:
        """What the tokens stand for, finite where it is not real."""
        ...


def paged_attention(
    q: Float[Array, "B T N Q"],
    keys: Packed,
    values: Packed,
    key_decoder: Decoder,
    value_decoder: Decoder,
    layer: LayerIndex,
    block_table: Int[Array, "B M"],
    length: Int[Array, "B T"],
    shift: Float[Array, "B T N M"] | None = None,
    oldest: Int[Array, "B T"] | None = None,
    *,
    scale: float,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B T N"]]:
    """(out, lse) in float32; a query that sees no token gets (0, -inf).

    Queries with more channels than keys meet values with the rest of them: latents are both.
    ``shift`` is added to q . k for all tokens of a page. ``oldest`` is the first token that a query
    sees, if that is not the first of all.
    Slots at and past ``length``, and pages the block table does not name, may hold anything.
    """
    B, T, N, _ = q.shape
    K, p = keys.kv_heads, keys.page
    G, R = N // K, N // K * T

    def rows(x: Float[Array, "B T N n"]) -> Float[Array, "B K R n"]:
        """All that read a KV head side by side, which is one product then."""
        return x.reshape(B, T, K, G, -1).transpose(0, 2, 3, 1, 4).reshape(B, K, R, -1)

    block = _SMALL_BLOCK if T == 1 else _BLOCK
    round_pages = max(1, min(block // p, block_table.shape[1]))
    padding = 0, -block_table.shape[1] % round_pages
    block_table = jnp.pad(block_table, ((0, 0), padding))
    if shift is not None:
        shift = rows(jnp.pad(shift * scale, (*[(0, 0)] * 3, padding)))
    q = rows(q.astype(jnp.float32) * scale)

    def one_round(i, carry):
        top, total, acc = carry
        pages = jax.lax.dynamic_slice_in_dim(block_table, i * round_pages, round_pages, axis=1)
        token = i * round_pages * p + jnp.arange(round_pages * p)  # [S], S tokens this round
        visible = token[None, None] < length[..., None]  # [B, T, S]
        if oldest is not None:
            visible &= token[None, None] >= oldest[..., None]
        real = visible.any(1)
        key, value = (
            decoder.decode(load_pages(packed, layer, pages), real)
            for decoder, packed in ((key_decoder, keys), (value_decoder, values))
        )
        if key.shape[-1] < q.shape[-1]:
            key = jnp.concatenate([key, value], axis=-1)
        scores = jnp.einsum("bkrh,bskh->bkrs", q, key, precision="highest")
        if shift is not None:
            each = jax.lax.dynamic_slice_in_dim(shift, i * round_pages, round_pages, axis=-1)
            scores += jnp.repeat(each, p, axis=-1)
        scores = jnp.where(jnp.tile(visible, (1, G, 1))[:, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(-1))
        base = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
        weights = jnp.exp(scores - base[..., None])
        decay = jnp.exp(top - base)
        total = total * decay + weights.sum(-1)
        new = jnp.einsum("bkrs,bskh->bkrh", weights, value, precision="highest")
        return new_top, total, acc * decay[..., None] + new

    first, rounds = 0, -(-length.max() // (round_pages * p))
    if oldest is not None:  # rounds before are seen by nobody
        first = jnp.maximum(oldest.min(), 0) // (round_pages * p)
    channels = _channels(values, value_decoder)
    empty = jnp.full((B, K, R), -jnp.inf), jnp.zeros((B, K, R)), jnp.zeros((B, K, R, channels))
    top, total, acc = jax.lax.fori_loop(first, rounds, one_round, empty)
    out = acc / jnp.where(total > 0, total, 1.0)[..., None]
    lse = jnp.log(total) + jnp.where(jnp.isneginf(top), 0.0, top)
    return _by_token(out, T), _by_token(lse[..., None], T)[..., 0]


def _channels(packed: Packed, decoder: Decoder) -> int:
    """Of what a decoder reads."""

    def one_token():
        token = load_pages(packed, 0, jnp.zeros((1, 1), jnp.int32))
        return decoder.decode(token, jnp.ones((1, packed.page), bool))

    return jax.eval_shape(one_token).shape[-1]


def _by_token(x: Float[Array, "B K R n"], T: int) -> Float[Array, "B T N n"]:
    """Rows back where they came from."""
    B, K, R, n = x.shape
    return x.reshape(B, K, R // T, T, n).transpose(0, 3, 1, 2, 4).reshape(B, T, -1, n)


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


def load_tokens(
    pages: Packed, layer: LayerIndex, page: Int[Array, "B T"], slot: Int[Array, "B T"]
) -> Packed:
    """Tokens of one layer by their pages and slots, in a row [B, T, ...]; not of a stream."""
    codes, params, index = (
        None if array is None else array.at[at].get(mode="promise_in_bounds")
        for array, at in (
            (pages.codes, (layer, page, slice(None), slot)),
            (pages.params, (layer, page, slice(None), slice(None), slot)),
            (pages.index, (layer, page, slot)),
        )
    )
    assert codes is not None and not pages.stream
    return Packed(codes, params, index)
