"""chunk_attention: attention of queries over exact keys and values, under any mask.

out[t] = sum_s softmax_s(scale * (q[t] . k[s] + shift[t, s])) v[s]

over the s that t may see, in float32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def chunk_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    visible: Bool[Array, "B T S"],
    shift: Float[Array, "B T N S"] | None = None,
    *,
    scale: float,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """(out, lse) in float32; a query that sees nothing gets (0, -inf).

    Keys and values that no query sees may be anything.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    real = visible.any(1)[..., None, None]
    k, v = (jnp.where(real, x.astype(jnp.float32), 0.0) for x in (k, v))
    q = q.astype(jnp.float32).reshape(B, T, K, N // K, H) * scale
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, precision="highest")
    if shift is not None:
        scores += shift.reshape(B, T, K, N // K, -1).transpose(0, 2, 3, 1, 4) * scale
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v, precision="highest")
    return out.reshape(B, T, N, H), lse.transpose(0, 3, 1, 2).reshape(B, T, N)
