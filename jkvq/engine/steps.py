"""The compiled steps of generation: a chunk of prompt, the first token, a burst of tokens.

Each takes the cache, updates it in place (it is donated) and gives it back. On a GPU nothing
crosses to the host inside a burst.
"""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jkvq.attention.pack import pack_due
from jkvq.cache.basis import Basis
from jkvq.cache.layout import PACK_EVERY, KVCache
from jkvq.cache.specs.spec import CacheSpec
from jkvq.engine.drawing.adjust import Adjust
from jkvq.engine.drawing.scores import Scored, Tops, logprob_of, score, tops_of
from jkvq.engine.forward import forward
from jkvq.engine.sampling import MOST_TOPS, Draws, SamplerArrays, sample
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params, logits, without_layers
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
    adjust: Adjust | None = None  # while somebody asks for it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drawn:
    """What one launch has drawn: row b holds its first ``count[b]`` tokens, then padding.

    active, failed: as in `Decoding`, after it.
    tops: the likeliest tokens where each was drawn, if somebody asks for them.
    """

    tokens: Int[Array, "B burst"]
    logprobs: Float[Array, "B burst"]
    count: Int[Array, " B"]
    active: Bool[Array, " B"]
    failed: Bool[Array, " B"]
    tops: Tops | None = None


def prefill_chunk(
    config: ModelConfig,
    params: Params,
    basis: Basis,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    implementation: Implementation = "reference",
    following: Int[Array, "B T"] | None = None,
) -> tuple[KVCache, Float[Array, "B D"], Scored | None]:
    """Stores a chunk of each prompt, and returns the hidden states of their last tokens.

    ``following`` are the tokens behind each of them, which are scored if they are given.
    """
    hidden, cache = forward(
        config, params, basis, cache, tokens, count, phase="prefill", implementation=implementation
    )
    scored = None if following is None else score(config, params, hidden, following)
    return cache, _last(hidden, count), scored


@jax.jit
def _last(hidden: Float[Array, "B T D"], count: Int[Array, " B"]) -> Float[Array, "B D"]:
    return jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]


@functools.partial(
    jax.jit, static_argnames=("config", "draws", "tops"), donate_argnames=("state", "length")
)
def join(
    config: ModelConfig,
    ends: Params,
    hidden: Float[Array, "R D"],
    state: Decoding,
    length: Int[Array, " B"],
    slot: Int[Array, " R"],
    new: Decoding,
    stored: Int[Array, " R"],
    known: Int[Array, " R"],
    draws: Draws,
    tops: bool,
) -> tuple[Decoding, Int[Array, " B"], Drawn]:
    """Draws the first token of R prompts, and puts them into their slots.

    A slot past the end stands for padding. ``known`` is a token that is drawn in any case, or -1.
    With ``tops`` the likeliest tokens are told too.
    """
    new, drawn = _draw(logits(config, ends, hidden), new, known, draws, tops)
    state = jax.tree.map(lambda all, own: all.at[slot].set(own, mode="drop"), state, new)
    return state, length.at[slot].set(stored, mode="drop"), drawn


def decode_burst(
    config: ModelConfig,
    params: Params,
    basis: Basis,
    cache: KVCache,
    state: Decoding,
    keep: Bool[np.ndarray, " B"],
    known: Int[np.ndarray, "B BURST"],
    limit: int,
    draws: Draws,
    implementation: Implementation = "reference",
    tops: bool = False,
) -> tuple[KVCache, Decoding, Drawn]:
    """Draws up to ``limit`` more tokens per sequence.

    Sequences not to ``keep`` end before. ``known`` are tokens that are drawn in any case, or -1.
    There are no more than `most_steps`: what is packed is packed before a burst.

    On a GPU all layers are one program, and no launch waits for the one before: a burst has
    ``limit`` steps, also if all sequences have ended. The program takes long to compile: a CPU has
    one for each layer, which costs a tenth to a fifth of its tokens per second and spares it a
    minute.
    """
    run_layers = layer_by_layer if _on_cpu() else all_layers
    state = dataclasses.replace(state, active=_and(state.active, keep))
    plain = _plain(state)
    if cache.spec.windowed:
        cache = _pack(cache, basis, plain, np.int32(limit), implementation)
    known, burst = jax.device_put(known), _begin(plain, _tops_at_a_place(config, tops))
    ends = without_layers(params)
    for _ in range(limit):
        if _on_cpu() and not np.asarray(state.active).any():
            break
        hidden, cache = run_layers(config, params, basis, cache, _plain(state), implementation)
        state, burst = _draw_next(config, ends, hidden, state, known, burst, draws, tops)
        # Freed now, the next step's hidden states take the same place: a GPU launches a recorded
        # program whose arrays have moved only after it has recorded the new places.
        del hidden
    return cache, state, burst.drawn


def _plain(state: Decoding) -> Decoding:
    """What the layers see, whose programs take long to compile, whoever is in the batch."""
    return dataclasses.replace(state, adjust=None)


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def most_steps(spec: CacheSpec) -> int:
    """Steps of a burst at most: all that it reads packed must be complete before it."""
    return min(BURST, spec.recent) if spec.windowed else BURST


@jax.jit
def _and(one: Bool[Array, " B"], other: Bool[Array, " B"]) -> Bool[Array, " B"]:
    return one & other


@functools.partial(jax.jit, static_argnames="implementation", donate_argnames="cache")
def _pack(cache: KVCache, basis: Basis, state: Decoding, steps, implementation) -> KVCache:
    """The cache with everything packed that the next steps read so."""
    return pack_due(cache, basis, jnp.where(state.active, steps, 0), implementation)


def layer_by_layer(
    config: ModelConfig,
    params: Params,
    basis: Basis,
    cache: KVCache,
    state: Decoding,
    implementation: Implementation,
) -> tuple[Float[Array, "B 1 D"], KVCache]:
    """Stores the newest token of each sequence; returns its hidden states, and the cache."""
    token, count = _new_tokens(state)
    return forward(
        config, params, basis, cache, token, count, phase="decode", implementation=implementation
    )


all_layers = jax.jit(
    layer_by_layer, static_argnames=("config", "implementation"), donate_argnames="cache"
)


@jax.jit
def _new_tokens(state: Decoding) -> tuple[Int[Array, "B 1"], Int[Array, " B"]]:
    """The newest token of each sequence, and how many of it there are: 1 or 0."""
    return state.token[:, None], state.active.astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Burst:
    """What the steps of a burst have drawn so far, and how many there were."""

    step: Int[Array, ""]
    drawn: Drawn


def _tops_at_a_place(config: ModelConfig, tops: bool) -> int:
    return min(MOST_TOPS, config.vocab) if tops else 0


@functools.partial(jax.jit, static_argnames="tops")
def _begin(state: Decoding, tops: int) -> _Burst:
    shape = len(state.token), BURST
    nothing = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros_like(state.made)
    # The steps give these away, so they are no arrays of the state.
    active, failed = (jnp.logical_or(x, False) for x in (state.active, state.failed))
    no_tops = Tops(jnp.zeros((*shape, tops), jnp.int32), jnp.zeros((*shape, tops), jnp.float32))
    return _Burst(jnp.int32(0), Drawn(*nothing, active, failed, no_tops if tops else None))


@functools.partial(
    jax.jit, static_argnames=("config", "draws", "tops"), donate_argnames=("state", "burst")
)
def _draw_next(
    config, ends: Params, hidden, state: Decoding, known, burst: _Burst, draws: Draws, tops: bool
):
    """A token of each sequence, after its hidden states."""
    step, drawn = burst.step, burst.drawn
    now = jax.lax.dynamic_index_in_dim(known, step, axis=1, keepdims=False)
    state, new = _draw(logits(config, ends, hidden[:, 0]), state, now, draws, tops)
    tokens, logprobs, likeliest = jax.tree.map(
        lambda all, one: jax.lax.dynamic_update_slice_in_dim(all, one, step, axis=1),
        (drawn.tokens, drawn.logprobs, drawn.tops),
        (new.tokens, new.logprobs, new.tops),
    )
    count = drawn.count + new.count
    drawn = Drawn(tokens, logprobs, count, new.active, new.failed, likeliest)
    return state, _Burst(step + 1, drawn)


def _draw(
    scores: Float[Array, "B V"],
    state: Decoding,
    known: Int[Array, " B"],
    draws: Draws,
    tops: bool,
) -> tuple[Decoding, Drawn]:
    """Draws a token for each active sequence; its log-probability is the model's own."""
    before, active = state.made, state.active.astype(jnp.int32)
    failed = state.failed | (state.active & jnp.isnan(scores).any(-1))
    adjust = state.adjust
    added = None if adjust is None else adjust.added(state.sampler)
    token = sample(scores, state.seen, state.made, state.sampler, draws, added)
    token = jnp.where(known >= 0, known, token)
    token = jnp.where(state.active, token, state.token)
    made = before + active
    stopped = (token[:, None] == state.stop_tokens).any(-1)
    row = jnp.arange(token.shape[0])
    state = dataclasses.replace(
        state,
        token=token,
        made=made,
        active=state.active & ~stopped & ~failed & (made < state.budget),
        failed=failed,
        seen=state.seen.at[row, token].set(True),
        adjust=None if adjust is None else adjust.counted(token, state.active),
    )
    likeliest = jax.tree.map(lambda x: x[:, None], tops_of(scores)) if tops else None
    logprob = logprob_of(scores, token)
    drawn = Drawn(token[:, None], logprob[:, None], active, state.active, failed, likeliest)
    return state, drawn
