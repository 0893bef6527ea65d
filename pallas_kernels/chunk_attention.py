"""chunk_attention: causal attention of a chunk of T tokens over itself.

out[t] = sum_s softmax_s(scale * q[t] . k[s]) v[s] over s <= t and s < count, in float32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def chunk_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    count: Int[Array, " B"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """(out, lse) in float32; a sequence with no tokens gives (0, -inf)."""
    B, T, N, H = q.shape
    K = k.shape[2]
    q = q.astype(jnp.float32).reshape(B, T, K, N // K, H) * scale
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k.astype(jnp.float32), precision="highest")
    index = jnp.arange(T)
    causal = index[:, None] >= index[None, :]
    real = index[None, :] < count[:, None]
    visible = causal[None, None, None] & real[:, None, None, None, :]
    scores = jnp.where(visible, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v.astype(jnp.float32), precision="highest")
    return out.reshape(B, T, N, H), lse.transpose(0, 3, 1, 2).reshape(B, T, N)
