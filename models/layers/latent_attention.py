"""Multi-head latent attention (MLA), over latents as they are.

A token's keys and values are linear in one short vector, its latent c: k = W_k c and v = W_v c of
each head, beside a key with rotary positions that all heads share. So q . k = (W_k^T q) . c, and
the sum of values is W_v times the sum of latents: queries are taken to where latents are, and the
output is taken back from there. Nothing is ever expanded.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jkvq.models.config import ModelConfig
from jkvq.models.layers.attention import Attend, Rotary, amplified
from jkvq.models.layers.linear import Linear, RMSNorm, precision_of
from jkvq.pallas_kernels.rotary import rotate
from jkvq.pallas_kernels.types import NewHeads

_NORM_EPS = 1e-6  # whatever the config says of other norms


class LatentAttention(nnx.Module):
    """Attention whose keys are the rotary ones, and whose values are latents that are keys too."""

    def __init__(self, config: ModelConfig):
        latent = config.latent
        assert latent is not None
        self.config, self.latent = config, latent
        rank, queries = latent.query_rank, config.heads * (latent.key + config.head_dim)
        self.q_a = None if rank is None else Linear(config.width, rank, bias=config.out_bias)
        self.q_norm = None if rank is None else RMSNorm(rank, _NORM_EPS)
        self.q = Linear(config.width, queries) if rank is None else None
        self.q_b = None if rank is None else Linear(rank, queries)
        self.kv_a = Linear(config.width, latent.width + config.head_dim, bias=config.out_bias)
        self.kv_norm = RMSNorm(latent.width, _NORM_EPS)
        self.kv_b = Linear(latent.width, config.heads * (latent.key + latent.value))
        self.o = Linear(config.heads * latent.value, config.width, bias=config.out_bias)

    def __call__(self, x, rotary: tuple[Rotary, ...], attend: Attend, state):
        (B, T, _), N = x.shape, self.config.heads
        latent, (cos, sin) = self.latent, rotary[self.config.rotary]
        q = self._queries(x).reshape(B, T, N, -1)
        plain, turned = q[..., : latent.key], q[..., latent.key :]
        compressed = self.kv_a(x)
        c = self.kv_norm(compressed[..., : latent.width])[:, :, None]
        k = rotate(compressed[..., latent.width :][:, :, None], cos, sin)
        to_keys, to_values = self._heads()
        precision = precision_of(x)
        q = jnp.concatenate(
            [
                rotate(turned, *amplified(self.config, cos, sin)),
                jnp.einsum("btnh,nhc->btnc", plain, to_keys, precision=precision),
            ],
            axis=-1,
        )
        out, state = attend(NewHeads.of(q), NewHeads.of(k), NewHeads.of(c), state)
        out = jnp.einsum("btnc,nhc->btnh", out, to_values, precision=precision)
        return self.o.unsummed(out.reshape(B, T, -1)), state

    def _queries(self, x: Float[Array, "B T D"]) -> Float[Array, "B T _"]:
        """Of all heads, by way of a short vector where they have one."""
        if self.q is not None:
            return self.q(x)
        assert self.q_a is not None and self.q_norm is not None and self.q_b is not None
        return self.q_b(self.q_norm(self.q_a(x)))

    def _heads(self) -> tuple[Float[Array, "N key C"], Float[Array, "N value C"]]:
        """What makes keys, and what makes values, of a latent."""
        weight = self.kv_b.weight[...].reshape(self.config.heads, -1, self.latent.width)
        return weight[:, : self.latent.key], weight[:, self.latent.key :]
