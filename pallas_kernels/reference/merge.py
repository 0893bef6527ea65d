"""merge: attention over two disjoint sets of keys from the attention over each.

With lse the log of a segment's softmax denominator, the whole is the average of the parts weighted
by exp(lse). A segment without keys has lse = -inf and any finite output. A logit that every query
has beside those of its keys, a learned *sink*, is one more segment: its lse is the logit itself.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float


def merge(
    out_a: Float[Array, "*rows H"],
    lse_a: Float[Array, "*rows"],
    out_b: Float[Array, "*rows H"],
    lse_b: Float[Array, "*rows"],
) -> tuple[Float[Array, "*rows H"], Float[Array, "*rows"]]:
    """The (out, lse) of both segments together; (0, -inf) where both are empty."""
    top = jnp.maximum(lse_a, lse_b)
    base = jnp.where(jnp.isneginf(top), 0.0, top)
    weight_a, weight_b = jnp.exp(lse_a - base), jnp.exp(lse_b - base)
    total = weight_a + weight_b
    safe = jnp.where(total > 0, total, 1.0)
    out = (weight_a[..., None] * out_a + weight_b[..., None] * out_b) / safe[..., None]
    return out, jnp.log(total) + base


def merge_all(parts: list) -> tuple[Float[Array, "*rows H"], Float[Array, "*rows"]]:
    """The (out, lse) of one or more segments together."""
    return functools.reduce(lambda whole, part: merge(*whole, *part), parts)


def sink_part(
    sinks: Float[Array, " N"], value: Float[Array, "K H"], rows: tuple[int, ...]
) -> tuple[Float[Array, "*rows N H"], Float[Array, "*rows N"]]:
    """The (out, lse) of sinks, the same for all rows: logits of query heads, and what is read."""
    N, (K, H) = len(sinks), value.shape
    each = jnp.repeat(value.astype(jnp.float32), N // K, axis=0)
    lse = sinks.astype(jnp.float32)
    return jnp.broadcast_to(each, (*rows, N, H)), jnp.broadcast_to(lse, (*rows, N))
