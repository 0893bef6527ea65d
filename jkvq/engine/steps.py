"""The compiled steps of generation: a chunk of prompt, the first token, a burst of tokens.

Each takes the cache, updates it in place (it is donated) and gives it back. Nothing crosses to the
host inside a burst.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jkvq.attention.pack import pack_due
from jkvq.cache.basis import Basis
from jkvq.cache.layout import PACK_EVERY, KVCache
from jkvq.engine.forward import forward
from jkvq.engine.sampling import SamplerArrays, sample
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params, logits
from jkvq.pallas_kernels.types import Implementation

BURST = PACK_EVERY  # the most tokens per launch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decoding:
    """Where each sequence of a batch stands."""

    token: Int[Array, " B"]  # the newest, not yet in the cache
    made: Int[Array, " B"]  # tokens drawn so far
    budget: Int[Array, " B"]  # tokens to draw at most
    active: Bool[Array, " B"]
    failed: Bool[Array, " B"]  # its scores were not numbers
    seen: Bool[Array, "B V"]  # tokens of the prompt and the text
    stop_tokens: Int[Array, "B E"]  # of each one, padded with -1
    sampler: SamplerArrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drawn:
    """The tokens of one burst: row b holds those that advanced ``made[b]``, then padding."""

    tokens: Int[Array, "B burst"]
    logprobs: Float[Array, "B burst"]


def prefill_chunk(
    config: ModelConfig,
    params: Params,
    basis: Basis,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    last: Float[Array, "B 1 D"],
    implementation: Implementation = "reference",
) -> tuple[KVCache, Float[Array, "B 1 D"]]:
    """Runs a chunk of each prompt; ``last`` keeps the newest real token's hidden state."""
    hidden, cache = forward(
        config, params, basis, cache, tokens, count, phase="prefill", implementation=implementation
    )
    return cache, _newest(hidden, count, last)


@functools.partial(jax.jit, donate_argnames="last")
def _newest(hidden: Float[Array, "B T D"], count: Int[Array, " B"], last: Float[Array, "B 1 D"]):
    end = jnp.maximum(count - 1, 0)[:, None, None]
    newest = jnp.take_along_axis(hidden, end, axis=1)
    return jnp.where((count > 0)[:, None, None], newest, last)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def draw_token(
    config: ModelConfig, params: Params, hidden: Float[Array, "B 1 D"], state: Decoding
) -> tuple[Decoding, Drawn]:
    """Draws a token of each active sequence from its newest token's hidden state."""
    state, logprob = _draw(logits(config, params, hidden[:, 0]), state)
    return state, Drawn(state.token[:, None], logprob[:, None])


def decode_burst(
    config: ModelConfig,
    params: Params,
    basis: Basis,
    cache: KVCache,
    state: Decoding,
    limit: int,
    implementation: Implementation = "reference",
) -> tuple[KVCache, Decoding, Drawn]:
    """Draws up to ``limit`` more tokens per sequence, and stops when all sequences have ended.

    Of a cache with a recent window no more than that: what is packed is packed before a burst.

    On a GPU a burst is one program of all layers, for no launch there shall wait for the host. It
    takes long to compile: a CPU runs a program for each layer, which costs a tenth to a fifth of
    its tokens per second and spares it a minute.
    """
    run = config, params, basis, cache, state
    if jax.default_backend() == "cpu":
        return _burst_by_layers(*run, limit, implementation)
    return unrolled_burst(*run, jnp.int32(limit), implementation)


_prepared: set[Any] = set()


def prepare_burst(
    config: ModelConfig,
    params: Params,
    basis: Basis,
    cache: KVCache,
    state: Decoding,
    implementation: Implementation = "reference",
) -> tuple[KVCache, Decoding]:
    """Compiles what bursts of these shapes run, where that is not done; changes nothing.

    So that nobody who watches sees a first token and then waits for a compiler.
    """
    shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves((cache, state)))
    kind = config, cache.spec, params["embedding"].dtype, implementation, shapes
    if kind in _prepared:
        return cache, state
    active, run = state.active, (config, params, basis, cache)
    # A step of which no sequence is a part
    state = dataclasses.replace(state, active=jax.device_put(np.zeros(len(active), bool)))
    if jax.default_backend() == "cpu":
        cache = _pack(cache, basis, state, 0, implementation)
        cache, state, _ = _one_token(config, params, basis, cache, state, implementation)
    else:
        cache, state, _ = unrolled_burst(*run, state, jnp.int32(0), implementation)
    _prepared.add(kind)
    return cache, dataclasses.replace(state, active=active)


def _burst_by_layers(config, params, basis, cache, state: Decoding, limit: int, implementation):
    drawn: list[Drawn] = []
    limit = _most_steps(cache, limit)
    if cache.spec.windowed:
        cache = _pack(cache, basis, state, limit, implementation)
    while len(drawn) < limit and np.asarray(state.active).any():
        cache, state, new = _one_token(config, params, basis, cache, state, implementation)
        drawn.append(new)
    return cache, state, jax.tree.map(lambda *steps: np.concatenate(steps, axis=1), *drawn)


def _most_steps(cache: KVCache, limit: int) -> int:
    """Steps of a burst, for which nothing has to be packed that is not complete."""
    return min(limit, BURST, cache.spec.recent) if cache.spec.windowed else limit


@functools.partial(jax.jit, static_argnames="implementation", donate_argnames="cache")
def _pack(cache: KVCache, basis: Basis, state: Decoding, steps, implementation) -> KVCache:
    """The cache with everything packed that the next steps read so."""
    return pack_due(cache, basis, jnp.where(state.active, steps, 0), implementation)


def _one_token(config, params, basis, cache, state: Decoding, implementation):
    token, count = _new_tokens(state)
    hidden, cache = forward(
        config, params, basis, cache, token, count, phase="decode", implementation=implementation
    )
    return cache, *draw_token(config, params, hidden, state)


@jax.jit
def _new_tokens(state: Decoding) -> tuple[Int[Array, "B 1"], Int[Array, " B"]]:
    """The newest token of each sequence, and how many of it there are: 1 or 0."""
    return state.token[:, None], state.active.astype(jnp.int32)


@functools.partial(
    jax.jit, static_argnames=("config", "implementation"), donate_argnames=("cache", "state")
)
def unrolled_burst(
    config: ModelConfig,
    params: Params,
    basis: Basis,
    cache: KVCache,
    state: Decoding,
    limit: Int[Array, ""],
    implementation: Implementation = "reference",
) -> tuple[KVCache, Decoding, Drawn]:
    """`decode_burst` in one program."""
    B = state.token.shape[0]
    drawn = Drawn(jnp.zeros((B, BURST), jnp.int32), jnp.zeros((B, BURST), jnp.float32))
    limit = jnp.minimum(limit, _most_steps(cache, BURST))
    cache = pack_due(cache, basis, jnp.where(state.active, limit, 0), implementation)

    def goes_on(carry):
        step, _, state, _ = carry
        return (step < limit) & state.active.any()

    def one_token(carry):
        step, cache, state, drawn = carry
        cache, state, new = _one_token(config, params, basis, cache, state, implementation)
        drawn = jax.tree.map(
            lambda all, one: jax.lax.dynamic_update_slice(all, one, (0, step)), drawn, new
        )
        return step + 1, cache, state, drawn

    start = (jnp.int32(0), cache, state, drawn)
    _, cache, state, drawn = jax.lax.while_loop(goes_on, one_token, start)
    return cache, state, drawn


def _draw(scores: Float[Array, "B V"], state: Decoding) -> tuple[Decoding, Float[Array, " B"]]:
    """Draws a token for each active sequence; its log-probability is the model's own."""
    failed = state.failed | (state.active & jnp.isnan(scores).any(-1))
    token = sample(scores, state.seen, state.made, state.sampler)
    token = jnp.where(state.active, token, state.token)
    chosen = jnp.take_along_axis(scores, token[:, None], axis=1)[:, 0]
    made = state.made + state.active.astype(jnp.int32)
    stopped = (token[:, None] == state.stop_tokens).any(-1)
    row = jnp.arange(token.shape[0])
    state = dataclasses.replace(
        state,
        token=token,
        made=made,
        active=state.active & ~stopped & ~failed & (made < state.budget),
        failed=failed,
        seen=state.seen.at[row, token].set(True),
    )
    return state, chosen - jax.nn.logsumexp(scores, axis=-1)
