"""The model over its cache: new tokens in, hidden states and the cache with the tokens out."""

import dataclasses
import functools

from jaxtyping import Array, Float, Int

from jkvq.attention.attend import LayerAttention
from jkvq.attention.step_plan import Phase, plan_step
from jkvq.cache.basis import Basis
from jkvq.cache.layout import KVCache
from jkvq.cache.shape import CacheShape
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
    first: int = 0,
) -> tuple[Float[Array, "B T D"], KVCache]:
    """Runs T new tokens per sequence; the first ``count[b]`` of row b are real, the rest padding.

    The cache is updated in place: layer by layer, each in a compiled program, unless all of it is
    being compiled by the caller.

    Args:
        config, params, basis: the model in the basis of its cache.
        cache: what is stored; it is donated.
        tokens, count: the new ones.
        phase: prefill, decode or forced (attention/step_plan.py).
        implementation: of attention.
        first: the rotary position of a sequence's first token.

    Returns:
        The final hidden states, which ``logits`` turns into scores of the next token, and the cache
        with the tokens stored.
    """
    spec, shape, basis = cache.spec, CacheShape.of(config), basis.starting_at(first)
    plan = plan_step(
        cache.sequences,
        basis,
        count,
        first,
        spec=spec,
        shape=shape,
        group=config.heads // config.kv_heads,
        width=tokens.shape[1],
        phase=phase,
        implementation=implementation,
    )
    attention = functools.partial(
        LayerAttention.of,
        spec=spec,
        shape=shape,
        basis=basis,
        plan=plan,
        scale=config.attention_scale,
        phase=phase,
        implementation=implementation,
    )
    hidden, groups = run(config, params, tokens, plan.rotary, attention, cache.groups)
    return hidden, dataclasses.replace(
        cache, groups=groups, sequences=cache.sequences.longer_by(count)
    )
