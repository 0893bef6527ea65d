"""KIVI and Kitty: caches whose keys are quantized channel by channel, over many tokens at once.

They exist in the evaluation only, as what others are compared with: their keys and values are
quantized and dequantized, never packed. Each query reads coded what had been quantized before its
token came, and the rest in 16 bits. Scale and lo are bfloat16, as everywhere here.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jkvq.cache.shape import CacheShape
from jkvq.pallas_kernels.formats import affine
from jkvq.pallas_kernels.formats.words import as_bfloat16
from jkvq.support.errors import UserError

_BOOSTED_BITS = 4


@jax.tree_util.register_static
@dataclass(frozen=True)
class ChannelWise:
    """How such a cache is kept. It is the same in every layer.

    bits: per code.
    key_group: tokens that share a scale of a key channel.
    value_group: channels that share a scale of a value token; a smaller head is one group.
    page: keys are quantized so many tokens at a time, when that many have come.
    recent: values that stay in 16 bits, older ones leaving one at a time; None is by pages too.
    sink: first tokens, which stay in 16 bits.
    boosted: the part of the key channels, those of the greatest mean magnitude in a page, that has
        4 bits.
    """

    bits: int
    key_group: int
    value_group: int
    page: int = 128
    recent: int | None = None
    sink: int = 0
    boosted: float = 0.0

    def check(self, head_dim: int) -> None:
        """Refuses heads that the groups of values do not divide."""
        if head_dim % min(self.value_group, head_dim):
            raise UserError(
                f"head_dim={head_dim}: this baseline shares scales by {self.value_group} channels "
                "of a value, which must divide it; there is none for such heads"
            )

    def layer(self, index: int) -> "ChannelWise":
        del index
        return self

    def windowed(self, k, v):
        return as_bfloat16(k.astype(jnp.float32)), as_bfloat16(v.astype(jnp.float32))

    def coded(self, k, v):
        k, v = self.windowed(k, v)
        return self._coded_keys(k), _decoded(v, self.bits, min(self.value_group, v.shape[-1]))

    def reads_coded(self, position, tokens):
        index = jnp.arange(tokens)[None] - self.sink
        keys, values = (count[:, None] for count in self.quantized(position))
        return (index >= 0) & (index < keys), (index >= 0) & (index < values)

    def quantized(self, stored):
        """How many keys and values of ``stored`` tokens, an array, are quantized."""
        past_sink = jnp.maximum(stored - self.sink, 0)
        keys = past_sink // self.page * self.page
        return keys, keys if self.recent is None else jnp.maximum(past_sink - self.recent, 0)

    def bits_per_element(self, shape: CacheShape, context: int) -> float:
        """Codes, scales, channel indices and the 16-bit buffers, which are counted whole."""
        H, pages = shape.head_dim, self.page
        boosted = self._boosted(H)
        index = 8 / pages if boosted else 0  # a byte says where a channel of a page is kept
        key = self.bits + (_BOOSTED_BITS - self.bits) * boosted / H + 32 / self.key_group + index
        value = self.bits + 32 / min(self.value_group, H)
        keys, values = (int(count) for count in self.quantized(jnp.asarray(context)))
        buffers = 2 * self.sink + pages + (pages if self.recent is None else self.recent)
        return (keys * key + values * value + 16 * buffers) / (2 * context)

    def _boosted(self, head_dim: int) -> int:
        return int(head_dim * self.boosted)

    def _coded_keys(self, k: Float[Array, "S K H"]) -> Float[Array, "S K H"]:
        S, K, H = k.shape
        packed = max(S - self.sink, 0)
        pages = -(-packed // self.page)
        if not pages:
            return k
        # A page that is not full is padded; nothing reads it.
        x = jnp.pad(k[self.sink :], ((0, pages * self.page - packed), (0, 0), (0, 0)))
        x = x.reshape(pages, self.page, K, H).transpose(0, 2, 3, 1)  # [pages, K, H, page]
        coded = _decoded(x, self.bits, self.key_group)
        count = self._boosted(H)
        if count:
            chosen = jax.lax.top_k(jnp.abs(x).mean(-1), count)[1]
            boost = jax.nn.one_hot(chosen, H, dtype=bool).any(-2)[..., None]
            coded = jnp.where(boost, _decoded(x, _BOOSTED_BITS, self.key_group), coded)
        coded = coded.transpose(0, 3, 1, 2).reshape(pages * self.page, K, H)
        return jnp.concatenate([k[: self.sink], coded[:packed]])


def _decoded(x: Float[Array, "*rows n"], bits: int, group: int) -> Float[Array, "*rows n"]:
    codes, scale, lo = affine.encode_min_max(x.reshape(*x.shape[:-1], -1, group), bits)
    return (lo[..., None] + scale[..., None] * codes).reshape(x.shape)


BASELINES = {
    "kivi-int2": ChannelWise(2, key_group=32, value_group=32, recent=128),
    "kivi-int4": ChannelWise(4, key_group=32, value_group=32, recent=128),
    "kitty-int2": ChannelWise(2, key_group=128, value_group=128, sink=32, boosted=1 / 8),
    "kitty25-int2": ChannelWise(2, key_group=128, value_group=128, sink=32, boosted=1 / 4),
}
