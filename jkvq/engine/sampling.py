"""Drawing the next token, each sequence by its own rules and its own random stream."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jkvq.support.arguments import INT32, number, refusal, whole

MOST_TOPS = 20  # of the likeliest tokens that can be told; OpenAI's


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The rules apply in the order of the fields.

    repetition_penalty: scores of tokens seen in the prompt or the text are divided by it where
        positive and multiplied where negative; 1 is off.
    frequency_penalty: is taken from a token's score for every time that it is in the text, without
        the prompt; 0 is off.
    presence_penalty: is taken from it once if it is in the text at all; 0 is off.
    logit_bias: what is added to the scores of single tokens, by token.
    temperature: scores are divided by it; 0 takes the most likely token.
    top_k: only the k most likely tokens (and those tied with the last); 0 is off.
    top_p: of those, the fewest most likely whose probability reaches p; 1 is off.
    min_p: of those, the ones at least min_p times as likely as the most likely; 0 is off.
    seed: of this sequence's random stream.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self):
        for name, (check, *allowed) in _ALLOWED.items():
            object.__setattr__(self, name, check(name, getattr(self, name), *allowed))

    @property
    def adjusts(self) -> bool:
        """Whether scores change by more than what is always there."""
        return bool(self.frequency_penalty or self.presence_penalty or self.logit_bias)


def _biases(name: str, given: Any, allowed: str) -> dict[int, float]:
    if not isinstance(given, Mapping):
        raise refusal(name, given, allowed)
    return {
        whole(name, token, 0, INT32, allowed): number(name, value, -100, 100, allowed)
        for token, value in given.items()
    }


_ABOVE_0, _FINITE = 2.0**-126, 2.0**127  # as float32, which they become
_COLD = 2.0**-100  # scores that were divided by less might be infinite


def _temperature(name: str, given: Any, least: float, most: float, allowed: str) -> float:
    """Temperatures next to 0 are 0: they take the most likely token as well."""
    value = number(name, given, least, most, allowed)
    return value if value >= _COLD else 0.0


_ALLOWED = {
    "repetition_penalty": (number, _ABOVE_0, _FINITE, "a number above 0; 1 is off"),
    "frequency_penalty": (number, -2, 2, "a number from -2 to 2; 0 is off"),
    "presence_penalty": (number, -2, 2, "a number from -2 to 2; 0 is off"),
    "logit_bias": (_biases, "a number from -100 to 100 for each token"),
    "temperature": (_temperature, 0, _FINITE, "a number, 0 (most likely token) or more"),
    "top_k": (whole, 0, INT32, f"a whole number from 1 to {INT32}, or 0 for off"),
    "top_p": (number, _ABOVE_0, 1, "a number above 0 and at most 1; 1 is off"),
    "min_p": (number, 0, 1, "a number from 0 (off) to 1"),
    "seed": (whole, 0, 2**64 - 1, "a whole number from 0 to 2**64 - 1"),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerArrays:
    """The `Sampling` of each sequence of a batch, stacked; a seed as its high and its low word."""

    repetition_penalty: Float[Array, " B"]
    frequency_penalty: Float[Array, " B"]
    presence_penalty: Float[Array, " B"]
    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    seed: UInt32[Array, "B 2"]

    @classmethod
    def stack(cls, rows: Sequence[Sampling]) -> "SamplerArrays":
        """Of numpy's arrays: a program that takes them is ten times faster than `device_put`."""

        def column(name: str, dtype) -> Any:
            return np.asarray([getattr(row, name) for row in rows], dtype)

        seed: Any = np.asarray([divmod(row.seed, 2**32) for row in rows], np.uint32)
        return cls(
            column("repetition_penalty", np.float32),
            column("frequency_penalty", np.float32),
            column("presence_penalty", np.float32),
            column("temperature", np.float32),
            column("top_k", np.int32),
            column("top_p", np.float32),
            column("min_p", np.float32),
            seed,
        )


# "greedy": all sequences take the most likely token.
# "drawn": some draw, from all tokens.
# "filtered": some draw from the most likely tokens, for which the scores are read many times.
Draws = Literal["greedy", "drawn", "filtered"]


def draws_of(rows: Iterable[Sampling]) -> Draws:
    """What it takes to serve all of these sequences."""
    drawn = [row for row in rows if row.temperature > 0]
    if any(row.top_k > 0 or row.top_p < 1 or row.min_p > 0 for row in drawn):
        return "filtered"
    return "drawn" if drawn else "greedy"


def sample(
    logits: Float[Array, "B V"],
    seen: Bool[Array, "B V"],
    step: Int[Array, " B"],
    sampler: SamplerArrays,
    draws: Draws,
    added: Float[Array, "B V"] | None = None,
) -> Int[Array, " B"]:
    """One token per sequence: the ``step``-th draw of its stream, whatever else is in the batch.

    What is ``added`` to the scores comes after the repetition penalty. The host says what ``draws``
    takes, as a GPU that branches asks its host and waits.
    """
    penalty = sampler.repetition_penalty[:, None]
    penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(seen, penalized, logits)
    if added is not None:
        logits = logits + added
    likeliest = logits.argmax(-1).astype(jnp.int32)
    if draws == "greedy":
        return likeliest
    greedy = sampler.temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, sampler.temperature)[:, None]
    kept = _filter(scaled, sampler) if draws == "filtered" else scaled
    streams = jax.random.wrap_key_data(sampler.seed, impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in)(streams, step)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    return jnp.where(greedy, likeliest, (kept + noise).argmax(-1).astype(jnp.int32))


def _filter(scaled: Float[Array, "B V"], sampler: SamplerArrays) -> Float[Array, "B V"]:
    """The scores with those that top_k, top_p or min_p exclude at -inf.

    What is kept are the scores from some threshold on, which is found bit by bit: that takes as
    many readings of them as a number has bits, and no sorting.
    """
    order = _in_order(scaled)
    few = _threshold(lambda kept: kept.sum(-1) >= sampler.top_k, order)
    kept = (order >= few[:, None]) | (sampler.top_k == 0)[:, None]
    weight = jnp.where(kept, jnp.exp(scaled - scaled.max(-1, keepdims=True)), 0.0)
    mass = sampler.top_p * weight.sum(-1)
    likely = _threshold(lambda kept: jnp.where(kept, weight, 0.0).sum(-1) >= mass, order)
    kept &= (order >= likely[:, None]) | (sampler.top_p == 1)[:, None]
    return jnp.where(kept & (weight >= sampler.min_p[:, None]), scaled, -jnp.inf)


def _in_order(x: Float[Array, "*n"]) -> UInt32[Array, "*n"]:
    """Integers in the order of floats: greater where those are, but for the two zeros."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(
    enough: Callable[[Bool[Array, "B V"]], Bool[Array, " B"]], order: UInt32[Array, "B V"]
) -> UInt32[Array, " B"]:
    """The greatest number that leaves enough, if those from it on are kept; 0 if none does."""

    def with_bit(i, threshold):
        higher = threshold | jnp.uint32(1 << 31) >> i.astype(jnp.uint32)
        return jnp.where(enough(order >= higher[:, None]), higher, threshold)

    return jax.lax.fori_loop(0, 32, with_bit, jnp.zeros(len(order), jnp.uint32))
