"""chunk_attention: attention of queries over exact keys and values, under any mask.

out[t] = sum_s softmax_s(scale * (q[t] . k[s] + shift[t, s])) v[s]

over the s that t may see, in float32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jkvq.pallas_kernels.reference.dense_attention import products, softmax, weighted_sum


def chunk_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K C"],
    visible: Bool[Array, "B T S"],
    shift: Float[Array, "B T N S"] | None = None,
    *,
    scale: float,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B T N"]]:
    """(out, lse) in float32; a query that sees nothing gets (0, -inf).

    Keys and values that no query sees may be anything.
    """
    real = visible.any(1)[..., None, None]
    k, v = (jnp.where(real, x.astype(jnp.float32), 0.0) for x in (k, v))

    def attend(q, k, v, visible, shift):
        logits = products(q.astype(jnp.float32) * scale, k)
        if shift is not None:
            logits += shift.reshape(len(q), *logits.shape[:2], -1).transpose(1, 2, 0, 3) * scale
        weights, lse = softmax(logits, visible)
        return weighted_sum(weights, v), lse.reshape(q.shape[1], len(q)).T

    return jax.vmap(attend)(q, k, v, visible, shift)
