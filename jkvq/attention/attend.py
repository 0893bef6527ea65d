"""Attention of new tokens over the cache and themselves.

What a query sees of the tokens before it is divided by one number, its *boundary*: packed tokens
below it are read from pages; the sink, and packed-to-be tokens from it on, are read exactly, from
the windows or from the chunk itself.
"""

import functools

import jax
from jaxtyping import Array, Float

from jkvq.attention.layer_view import LayerView
from jkvq.attention.reference import attend_plainly
from jkvq.attention.step_plan import Chunk, GroupPlan, Phase
from jkvq.cache.layout import KVCache
from jkvq.pallas_kernels.types import Implementation


# Compiled by itself so that it is traced once, and not for every layer.
@functools.partial(jax.jit, static_argnames=("scale", "phase", "implementation"))
def attend(
    view: LayerView,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    chunk: Chunk,
    plan: GroupPlan,
    *,
    scale: float,
    phase: Phase,
    implementation: Implementation = "reference",
) -> tuple[Float[Array, "B T N H"], KVCache]:
    """Stores k and v of a chunk in one layer, and lets its queries attend.

    Values come, and the output goes, in the basis of the cache (cache/basis.py). The returned cache
    holds the new tokens; its ``length`` is the caller's to advance, once all layers are through.
    """
    if implementation == "reference":
        out, cache = attend_plainly(view, q, k, v, chunk, plan, scale=scale, phase=phase)
    else:
        # Loads the kernels, which nobody needs who runs without them.
        from jkvq.attention.kernels import attend_prefill, attend_token  # noqa: PLC0415

        attend_new = {"prefill": attend_prefill, "decode": attend_token}[phase]
        interpret = implementation == "interpret"
        out, cache = attend_new(view, q, k, v, chunk, plan, scale=scale, interpret=interpret)
    return out.astype(q.dtype), cache
