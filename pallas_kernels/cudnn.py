"""cuDNN's fused attention with its lse in float32: the one place that uses what jax keeps private.

`jax.nn.dot_product_attention` calls the same function, but rounds the lse to the inputs' 16 bits.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def fused_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    scale: float,
    causal: bool = False,
    lengths: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """(out, lse) in float32 of 16-bit inputs; ``lengths[b]`` of the S tokens are sequence b's."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn  # noqa: PLC0415 (GPUs only)

    kind, padding = (cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK), {}
    if lengths is not None:
        kind = cudnn.MaskType.PADDING
        padding = {"q_seqlen": jnp.full(q.shape[0], q.shape[1], jnp.int32), "kv_seqlen": lengths}
    out, lse = cudnn.dot_product_attention(
        q, k, v, scale=scale, mask_type=kind, return_residual=True, **padding
    )
    return out.astype(jnp.float32), lse.swapaxes(1, 2)
