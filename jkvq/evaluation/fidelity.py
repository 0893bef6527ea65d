"""What a cache does to attention, layer by layer, on the queries, keys and values of a text.

Keys, values, scores and outputs are compared on the exact activations of each layer; the hidden
states are those of a model that runs over the cache, against those of one that does not. One layer
is in memory at a time, and its queries are taken in blocks.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkvq.evaluation.reconstruct import (
    LayerReconstruction,
    Reconstruction,
    attend_reconstructed,
    in_blocks,
    mix,
    scores,
)
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import embed, run_layer
from jkvq.models.model import Model
from jkvq.pallas_kernels.reference.chunk_attention import chunk_attention
from jkvq.pallas_kernels.reference.dense_attention import causal, softmax
from jkvq.pallas_kernels.reference.merge import merge_all, sink_part
from jkvq.pallas_kernels.rotary import angles, rotated_dots
from jkvq.support.errors import UserError
from jkvq.support.progress import count_bar

_TOP = 10  # tokens whose overlap is measured
_OFFSETS = np.linspace(-1024, 1024, 50)  # Block-GTQ, appendix B.3


@dataclass(frozen=True)
class Fidelity:
    """Errors of one layer. Relative ones are squared errors over squared norms.

    key, value: relative error of keys and values as coded, windows or not. The others are of what
        each query reads, windows and all:
    score: mean |q . k - q . k^|, not scaled.
    rope_score: mean |q R k - q R k^| over rotary offsets R from -1024 to 1024, with q and k of the
        same token, all as coded.
    attention_kl: mean KL of the attention weights, in nats.
    top10: mean part of the ten most attended tokens that stays among them.
    mixed: relative error of the weighted values, S V.
    output: relative error after W_o.
    hidden: relative error of the hidden state after the layer, with this cache in all layers; the
        mean over tokens, as the first ones may be thousands of times as large as the rest.
    """

    key: float
    value: float
    score: float
    rope_score: float
    attention_kl: float
    top10: float
    mixed: float
    output: float
    hidden: float


def fidelity(
    model: Model, tokens: list[int], caches: Mapping[str, Reconstruction]
) -> dict[str, list[Fidelity]]:
    """Errors of each cache in each layer."""
    config = model.config
    if not _TOP < len(tokens) <= config.context:
        raise UserError(
            f"{len(tokens)} tokens: from {_TOP + 1} to the model's context of {config.context} "
            "are compared"
        )
    position = jnp.arange(len(tokens), dtype=jnp.int32)
    ids = jnp.asarray([tokens])
    exact, rotary = embed(config, model.params["embedding"], ids, position[None])
    lossy: dict[str, Any] = dict.fromkeys(caches, exact)
    found: dict[str, list[Fidelity]] = {name: [] for name in caches}
    with count_bar("Comparing layers", config.layers) as bar:
        for index in range(config.layers):
            params, own = model.params["layers"][index], config.layer(index)
            how = {"scale": own.attention_scale, "window": own.window}
            exact, qkv = run_layer(own, params, exact, rotary, _Exact(position, **how), None)
            for name, cache in caches.items():
                layer = cache.layer(index)
                attend = _Lossy(layer, position, **how)
                lossy[name], _ = run_layer(own, params, lossy[name], rotary, attend, None)
                attention = params["attention"]
                weights = attention["o"]["weight"], attention.get("sinks")
                errors = _attention_errors(layer, *weights, *qkv, **how)
                errors["rope_score"] = _rope_score(own, layer, *qkv)
                errors["hidden"] = _hidden_error(exact.total, lossy[name].total)
                found[name].append(Fidelity(**{key: float(x) for key, x in errors.items()}))
            bar.advance(1)
    return found


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Exact:
    """Exact attention, which gives q, k and v as its state."""

    position: Int[Array, " T"]
    scale: float = field(metadata={"static": True})
    window: int | None = field(metadata={"static": True})

    def __call__(self, q, k, v, state, sinks=None):
        del state
        q, k, v = (heads.finished for heads in (q, k, v))

        def exact(q, position):
            seen = causal(position, k.shape[1], self.window)[None]
            parts = [chunk_attention(q[None], k, v, seen, scale=self.scale)]
            if sinks is not None:
                parts.append(sink_part(sinks, jnp.zeros((1, q.shape[-1])), (1, len(q))))
            return merge_all(parts)[0][0]

        out = in_blocks(exact, q[0], self.position).reshape(-1, *q.shape[2:])[: q.shape[1]]
        return out[None].astype(q.dtype), (q[0], k[0], v[0])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Lossy:
    """Attention that reads what a cache gives back."""

    kept: LayerReconstruction
    position: Int[Array, " T"]
    scale: float = field(metadata={"static": True})
    window: int | None = field(metadata={"static": True})

    def __call__(self, q, k, v, state, sinks=None):
        q, k, v = (heads.finished for heads in (q, k, v))
        how = {"scale": self.scale, "window": self.window, "sinks": sinks}
        out = attend_reconstructed(self.kept, q[0], k[0], v[0], self.position, **how)
        return out[None].astype(q.dtype), state


@functools.partial(jax.jit, static_argnames=("scale", "window"))
def _attention_errors(
    kept: LayerReconstruction,
    out_weight: Float[Array, "D E"],
    sinks: Float[Array, " N"] | None,
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    *,
    scale: float,
    window: int | None,
) -> dict[str, Float[Array, ""]]:
    q, k, v, out_weight = (x.astype(jnp.float32) for x in (q, k, v, out_weight))
    T = len(q)
    windowed, coded = kept.windowed(k, v), kept.coded(k, v)

    def block(q: Float[Array, "t N H"], position: Int[Array, " t"]):
        """Sums over a block of queries; those past the end count for nothing."""
        real, seen = position < T, causal(position, T, window)
        key_coded, value_coded = kept.reads_coded(position, T)
        true = scores(q, k, k, key_coded)
        read = scores(q, windowed[0], coded[0], key_coded)
        counted = (seen & real[:, None])[None, None]
        weights, lse = softmax(scale * true, seen, sinks)
        read_weights, read_lse = softmax(scale * read, seen, sinks)
        # Weights add up to one, with the sink's, whose logit is the same in both.
        kl = jnp.where(counted, weights * scale * (true - read), 0.0).sum(-1)
        kl += jnp.where(real[None, None], read_lse - lse, 0.0)
        full = (real & (position >= _TOP - 1))[None, None]  # ten tokens are seen
        top, read_top = (jax.lax.top_k(w, _TOP)[1] for w in (weights, read_weights))
        kept_top = (top[..., None] == read_top[..., None, :]).any(-1).mean(-1)
        mixed = mix(weights, v, v, value_coded)
        read_mixed = mix(read_weights, windowed[1], coded[1], value_coded)
        flat = jnp.where(real[:, None], (read_mixed - mixed).reshape(len(q), -1), 0.0)
        mixed = jnp.where(real[:, None], mixed.reshape(len(q), -1), 0.0)
        after, error_after = (
            jnp.einsum("te,de->td", x, out_weight, precision="highest") for x in (mixed, flat)
        )
        heads = weights.shape[0] * weights.shape[1]
        return {
            "score": (jnp.where(counted, jnp.abs(true - read), 0.0).sum(), heads * counted.sum()),
            "attention_kl": (kl.sum(), heads * real.sum()),
            "top10": (jnp.where(full, kept_top, 0.0).sum(), heads * full.sum()),
            "mixed": ((flat**2).sum(), (mixed**2).sum()),
            "output": ((error_after**2).sum(), (after**2).sum()),
        }

    sums = in_blocks(block, q, jnp.arange(T, dtype=jnp.int32))
    errors = {name: a.sum() / b.sum().astype(jnp.float32) for name, (a, b) in sums.items()}
    return errors | {"key": _relative(k, coded[0]), "value": _relative(v, coded[1])}


@functools.partial(jax.jit, static_argnames="config")
def _rope_score(config: ModelConfig, kept: LayerReconstruction, q, k, v):
    """Mean |q R e| over offsets: both carry the rotation of their token, which cancels."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    error = kept.coded(k, v)[0] - k
    q = q.reshape(len(q), k.shape[1], -1, q.shape[-1])  # [T, K, G, H]
    offsets = angles(jnp.asarray(config.rope_frequency), jnp.asarray(_OFFSETS))
    return jnp.abs(rotated_dots(q, error[:, :, None], *offsets)).mean()


@jax.jit
def _relative(true, found):
    """|found - true|^2 / |true|^2 over everything."""
    true, found = true.astype(jnp.float32), found.astype(jnp.float32)
    return ((found - true) ** 2).sum() / (true**2).sum()


@jax.jit
def _hidden_error(true: Float[Array, "1 T D"], found: Float[Array, "1 T D"]):
    """|found - true|^2 / |true|^2 of each token, mean."""
    return jax.vmap(_relative)(true[0], found[0]).mean()
