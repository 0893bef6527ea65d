"""Attention of queries over all tokens of one sequence, under any mask: its three steps in float32.

The query heads that share a KV head are rows of one product: three times as fast on a CPU as heads
side by side.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def causal(
    position: Int[Array, " T"], tokens: int, window: int | None = None
) -> Bool[Array, "T S"]:
    """Which of tokens 0 to S - 1 a query sees: those up to itself, and in its window."""
    token, position = jnp.arange(tokens, dtype=jnp.int32)[None], position[:, None]
    seen = token <= position
    return seen if window is None else seen & (token > position - window)


def products(
    q: Float[Array, "T N H"], k: Float[Array, "S K H"], *, precision: str | None = "highest"
) -> Float[Array, "K G T S"]:
    """q . k of every query head, the N = K G of them by the KV head they read, with every token."""
    T, N, H = q.shape
    S, K, _ = k.shape
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    rows = q.reshape(T, K, N // K, H).transpose(1, 2, 0, 3).reshape(K, -1, H)
    found = jnp.einsum("krh,skh->krs", rows, k, precision=precision)
    return found.reshape(K, N // K, T, S)


def softmax(
    logits: Float[Array, "K G T S"],
    visible: Bool[Array, "T S"],
    sinks: Float[Array, " N"] | None = None,
) -> tuple[Float[Array, "K G T S"], Float[Array, "K G T"]]:
    """(weights, lse) over the tokens that a query sees; (0, -inf) where it sees nothing.

    lse is the logarithm of the sum of exp(logits). ``sinks`` are logits of query heads that take
    part in it, and whose weights belong to no token.
    """
    logits = jnp.where(visible[None, None], logits, -jnp.inf)
    top = jax.lax.stop_gradient(logits.max(-1))  # whatever it is, the result is the same
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(*logits.shape[:2], 1)
        top = jnp.maximum(top, jax.lax.stop_gradient(sinks))
    base = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(logits - base[..., None])
    total = weights.sum(-1)
    if sinks is not None:
        total = total + jnp.exp(sinks - base)
    weights = weights / jnp.where(total > 0, total, 1.0)[..., None]
    return weights, jnp.log(total) + base


def weighted_sum(
    weights: Float[Array, "K G T S"], v: Float[Array, "S K H"], precision: str | None = "highest"
) -> Float[Array, "T N H"]:
    """The sum of v of every token with these weights."""
    K, G, T, S = weights.shape
    v = v.astype(jnp.float32)
    rows = jnp.einsum("krs,skh->krh", weights.reshape(K, G * T, S), v, precision=precision)
    return rows.reshape(K, G, T, -1).transpose(2, 0, 1, 3).reshape(T, K * G, -1)
