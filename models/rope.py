"""Rotary embeddings as checkpoints describe them: what each frequency is divided by, and a gain.

Every kind of scaling comes down to these. Of a head's channels the first
``partial_rotary_factor`` part turns; where that is not all, loading puts the rest where pairs that
do not turn stand (formats/channels.py).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jkvq.models.fields import Fields, given, positive
from jkvq.support.errors import UserError

THETA = 10000.0  # where a checkpoint does not say


@dataclass(frozen=True)
class Rope:
    """The rotary angles of a layer.

    theta: of its frequencies.
    divisors: of the frequency of each pair that turns.
    gain: what channels that turn are multiplied by, of queries and of keys.
    """

    theta: float
    divisors: tuple[float, ...]
    gain: float = 1.0


@dataclass(frozen=True)
class _Start:
    """What a rule starts from."""

    rope: Fields
    theta: float
    pairs: int  # that turn
    context: int

    @property
    def original(self) -> float:
        return positive(self.rope, "original_max_position_embeddings", self.context)


def rope_fields(config: Fields, layers: str = "full_attention") -> dict[str, Any]:
    """What a config.json says of rotary angles, of these layers where they differ."""
    # Before transformers 5 the theta and the scaling stood apart; since then both are in one.
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    given = given[layers] if isinstance(given.get(layers), Mapping) else given
    return {**{name: config[name] for name in _BESIDE if config.get(name) is not None}, **given}


_BESIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def read_rope(rope: Fields, head_dim: int, context: int, theta: float = THETA) -> Rope:
    """The rotary angles that a config's ``rope_parameters`` describe.

    Args:
        rope: with the theta and ``partial_rotary_factor`` in it, where the config has them.
        head_dim: of the model.
        context: the longest sequence of the model.
        theta: where ``rope`` has none.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if "long_factor" in rope:  # "su" and "yarn" in checkpoints from before it had its name
        kind = "longrope"
    if kind not in _RULES:
        supported = ", ".join(_RULES)
        raise UserError(f"rope scaling '{kind}' is not supported; supported: {supported}")
    theta = float(positive(rope, "rope_theta", theta))
    part = positive(rope, "partial_rotary_factor", 1.0)
    rotary = int(head_dim * part)
    if head_dim % 2:
        raise UserError(f"head_dim={head_dim}: rotary embedding needs an even number")
    if part > 1 or rotary % 2 or not rotary:
        raise UserError(
            f"partial_rotary_factor={part}: of {head_dim} channels an even number must turn"
        )
    divisors, gain = _RULES[kind](_Start(rope, theta, rotary // 2, context))
    return Rope(theta, divisors, gain)


Rule = Callable[[_Start], tuple[tuple[float, ...], float]]  # to divisors and gain


def _default(start: _Start):
    return (1.0,) * start.pairs, 1.0


def _linear(start: _Start):
    return (float(positive(start.rope, "factor")),) * start.pairs, 1.0


def _dynamic(start: _Start):
    """It changes theta where a sequence is longer than the model's context: none is here."""
    positive(start.rope, "factor")
    return _default(start)


def _llama3(start: _Start):
    """Llama 3.1's rule: long waves are slowed by ``factor``, short ones kept, a ramp between."""
    rope, count_of = start.rope, (2 * start.pairs)
    low, high = positive(rope, "low_freq_factor"), positive(rope, "high_freq_factor")
    factor = positive(rope, "factor")
    original = positive(rope, "original_max_position_embeddings")

    def divisor(frequency: float) -> float:
        turns = original * frequency / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        return 1.0 / (kept + (1.0 - kept) / factor)

    return tuple(divisor(start.theta ** (-2 * i / count_of)) for i in range(start.pairs)), 1.0


def _yarn(start: _Start):
    """YaRN: a ramp over pairs from kept to slowed, between two numbers of turns; and a gain."""
    rope, pairs = start.rope, start.pairs
    factor = positive(rope, "factor", start.context / start.original)

    def pair_of(turns: float) -> float:
        """The pair that turns so often in the original context, as if they lay densely."""
        ratio = start.original / (turns * 2 * math.pi)
        return pairs * math.log(ratio) / math.log(start.theta)

    low, high = pair_of(rope.get("beta_fast") or 32), pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    high = high + 0.001 if low == high else high
    slowed = np.clip((np.arange(pairs) - low) / (high - low), 0, 1)
    divisors = 1 / (slowed / factor + 1 - slowed)

    def gain_of(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    one, all_channels = rope.get("mscale"), rope.get("mscale_all_dim")
    gain = gain_of(one) / gain_of(all_channels) if one and all_channels else gain_of(1)
    return tuple(divisors.tolist()), float(positive(rope, "attention_factor", gain))


def _longrope(start: _Start):
    """Divisors as the checkpoint lists them: those for long texts where its context is long.

    transformers takes those for short texts until a sequence is longer than the original context;
    keys that are stored have one position, so that here, as in other servers, the context decides.
    """
    name = "long_factor" if start.context > start.original else "short_factor"
    divisors = _numbers(start.rope, name, start.pairs)
    factor = positive(start.rope, "factor", start.context / start.original)
    gain = math.sqrt(1 + math.log(factor) / math.log(start.original)) if factor > 1 else 1.0
    return divisors, float(positive(start.rope, "attention_factor", gain))


def _numbers(rope: Fields, name: str, length: int) -> tuple[float, ...]:
    numbers = given(rope, name, None)
    if not isinstance(numbers, list | tuple) or len(numbers) != length:
        raise UserError(f"{name} of the rope scaling must list {length} numbers; fetch it again")
    each = [{name: number} for number in numbers]
    return tuple(float(positive(one, name)) for one in each)


_RULES: dict[str, Rule] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
