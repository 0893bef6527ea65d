"""Attention of sequences whose queries read some tokens as they are, and others as they are coded.

It is written twice: block by block, for any device and any float, and in one kernel of cuDNN. With
that a step of learning for SmolLM2 took 0.22 s on an H200, and in blocks 0.75 s, neither alone.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jkvq.cache.specs.spec import CacheSpec
from jkvq.models.layers.linear import precision_of
from jkvq.pallas_kernels.reference.dense_attention import causal, products, softmax, weighted_sum

# Of a sequence's queries: those of a block see nothing behind its end.
_BLOCKS, _LEAST = 4, 256  # how many, and tokens of one
_FUSED_HEAD = 128  # the widest heads that cuDNN has a way back for on all GPUs


def attend(
    spec: CacheSpec | None,
    scale: float,
    window: int | None,
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    coded_k: Float[Array, "T K H"] | None = None,
    coded_v: Float[Array, "T K H"] | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "T N H"]:
    """Attention of one sequence: a query sees a token as it is, or as it is coded, and not both."""
    precision, T = precision_of(q), len(q)
    exact, packed = visible_tokens(spec, window, T)

    @functools.partial(jax.checkpoint, static_argnums=(0, 1))
    def block(start: int, stop: int, q, k, v, coded_k, coded_v):
        own = slice(start, stop), slice(stop)
        keys, values, visible = k[:stop], v[:stop], exact[own]
        keys, values = keys.astype(jnp.float32), values.astype(jnp.float32)
        if coded_k is not None and coded_v is not None:
            keys = jnp.concatenate([keys, coded_k[:stop]])
            values = jnp.concatenate([values, coded_v[:stop]])
            visible = jnp.concatenate([visible, packed[own]], axis=1)
        scores = products(q[start:stop] * scale, keys, precision=precision)
        weights, _ = softmax(scores, visible, sinks)
        return weighted_sum(weights, values, precision)

    size = max(-(-T // _BLOCKS), _LEAST)
    outs = [
        block(start, min(start + size, T), q, k, v, coded_k, coded_v) for start in range(0, T, size)
    ]
    return jnp.concatenate(outs).astype(q.dtype)


def visible_tokens(
    spec: CacheSpec | None, window: int | None, tokens: int
) -> tuple[Bool[Array, "T T"], Bool[Array, "T T"]]:
    """Which tokens each query of a sequence sees as they are, and which as they are coded."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    seen = causal(token, tokens, window)
    if spec is None:
        return seen, jnp.zeros_like(seen)
    packed = spec.reads_packed(token[:, None], token[None])
    return seen & ~packed, seen & packed


def serves_fused(q: Float[Array, "B T N H"], sinks: Array | None) -> bool:
    """Whether `attend_fused` takes such queries on this device.

    Float16 is what GPUs compute in that have no bfloat16, and cuDNN has no such kernel for those.
    """
    _, T, _, H = q.shape
    fits = q.dtype == jnp.bfloat16 and H <= _FUSED_HEAD and H % 8 == 0 and T % 2 == 0
    return jax.default_backend() == "gpu" and fits and sinks is None


def attend_fused(
    spec: CacheSpec | None,
    scale: float,
    window: int | None,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    coded_k: Float[Array, "B T K H"] | None = None,
    coded_v: Float[Array, "B T K H"] | None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B T N H"]:
    """`attend` of several sequences in one kernel, forth and back, which stores no scores.

    Keys and values are in q's 16 bits, as the kernels of the cache multiply them.
    """
    visible, packed = visible_tokens(spec, window, q.shape[1])
    keys, values = ([x.astype(q.dtype)] for x in (k, v))
    if coded_k is not None and coded_v is not None:
        keys.append(coded_k.astype(q.dtype))
        values.append(coded_v.astype(q.dtype))
        visible = jnp.concatenate([visible, packed], axis=1)
    with jax.numpy_dtype_promotion("standard"):  # as jax.nn has it
        return jax.nn.dot_product_attention(
            q,
            jnp.concatenate(keys, axis=1),
            jnp.concatenate(values, axis=1),
            mask=visible[None, None],
            scale=scale,
            implementation=implementation,
        )
