"""The model over its cache: new tokens in, hidden states and the cache with the tokens out."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkvq.attention.attend import attend
from jkvq.attention.layer_view import LayerView
from jkvq.attention.step_plan import Phase, plan_step
from jkvq.cache.basis import Basis
from jkvq.cache.layout import KVCache
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params, run
from jkvq.pallas_kernels.types import Implementation


def forward(
    config: ModelConfig,
    params: Params,
    basis: Basis,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    *,
    phase: Phase,
    implementation: Implementation = "reference",
    first: Int[Array, ""] | int = 0,
) -> tuple[Float[Array, "B T D"], KVCache]:
    """Runs T new tokens per sequence; the first ``count[b]`` of row b are real, the rest padding.

    ``first`` is the rotary position of a sequence's first token.

    Returns the final hidden states, which ``logits`` turns into scores of the next token, and the
    cache with the tokens stored.
    """
    if phase == "forced" and implementation != "reference":
        return _one_by_one(config, params, basis, cache, tokens, count, implementation, first)
    basis = basis.starting_at(first)
    plan = plan_step(
        cache, basis, count, tokens.shape[1], phase=phase, implementation=implementation
    )
    how = {"scale": config.attention_scale, "phase": phase, "implementation": implementation}

    def over_cache(layer, q, k, v, cache):
        view = LayerView.of(cache, basis, layer)
        return attend(view, q, k, v, plan.chunk, plan.groups[view.group], **how)

    hidden, cache = run(config, params, tokens, first + plan.chunk.position, over_cache, cache)
    return hidden, dataclasses.replace(cache, length=cache.length + count)


def _one_by_one(config, params, basis, cache, tokens, count, implementation, first):
    """Known tokens through the kernels' own decode steps: what evaluation sees is what runs."""

    def step(cache, now):
        token, at = now
        hidden, cache = forward(
            *(config, params, basis, cache, token[:, None], (at < count).astype(jnp.int32)),
            phase="decode",
            implementation=implementation,
            first=first,
        )
        return cache, hidden[:, 0]

    steps = tokens.T, jnp.arange(tokens.shape[1], dtype=jnp.int32)
    cache, hidden = jax.lax.scan(step, cache, steps)
    return hidden.swapaxes(0, 1), cache
