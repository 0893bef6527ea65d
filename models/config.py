"""A decoder's architecture, in one vocabulary for every family.

families/ reads it from checkpoints. Everything in it comes from the checkpoint; what the decoder
cannot do is refused there, before any weight is read.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from jkvq.support.errors import UserError


@dataclass(frozen=True)
class LocalLayers:
    """Layers that see the latest tokens only, with rotary angles of their own."""

    layers: tuple[int, ...]
    window: int  # tokens that a query sees, itself among them
    rope_theta: float
    rope_divisors: tuple[float, ...]


@dataclass(frozen=True)
class Latent:
    """Keys and values that are linear in one short vector of each token (MLA).

    A model with it has one KV head: of rotary keys, beside which the latent stands for values, and
    for the rest of the keys (layers/latent_attention.py). ``head_dim`` is that of rotary keys.
    """

    width: int  # of the short vector
    key: int  # channels of a head's keys without rotary positions
    value: int  # channels of a head's values
    query_rank: int | None = None  # of a short vector that queries are made of


@dataclass(frozen=True)
class Experts:
    """Feed-forward blocks of which a router chooses a few for each token (layers/experts.py)."""

    number: int  # E
    chosen: int  # of them, for each token
    width: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True  # the weights of those chosen add up to one
    scale: float = 1.0  # what their weights are multiplied by
    corrected: bool = False  # a bias takes part in the choice, and not in the weights
    groups: int = 1  # of experts that stand side by side
    chosen_groups: int = 1  # of which experts are taken
    best_of_group: int = 2  # experts whose scores are that of their group
    shared_width: int = 0  # of an expert that every token has; 0 is none
    shared_gate: bool = False  # it has a weight of its own, a sigmoid
    dense_layers: tuple[int, ...] = ()  # those with a plain feed-forward block instead
    bias: bool = False  # experts and router have one
    clamp: float | None = None  # (up + 1) gate sigmoid(sharpness gate), both clamped to this first
    sharpness: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's architecture: hashable, so that compiled steps can be keyed by it."""

    family: str
    layers: int  # L
    width: int  # D
    mlp_width: int
    heads: int  # N
    kv_heads: int  # K
    head_dim: int  # H
    vocab: int  # V
    context: int  # the longest sequence the model was made for
    norm_eps: float
    rope_theta: float
    rope_divisors: tuple[float, ...]  # of each rotary pair's frequency; pairs beyond do not turn
    tied: bool = False  # the embedding is also the output head
    qk_bias: bool = False
    v_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False  # it is taken over all heads together
    sinks: bool = False  # every query head has a logit beside those of the tokens
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    pre_norm: bool = True  # what goes into attention and feed-forward blocks is normed
    post_norm: bool = False  # what comes out of them is
    norm_of_one: bool = False  # norms multiply by 1 + their weight
    embedding_scale: float = 1.0
    score_scale: float | None = None  # of attention, if it is not that of the head's size
    rope_gain: float = 1.0  # what channels that turn are multiplied by, of queries and of keys
    logit_cap: float | None = None  # scores of tokens are cap * tanh(score / cap)
    local: LocalLayers | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    # Of a layer's own config (``layer``):
    window: int | None = None  # tokens that a query sees, itself among them; None is all
    rotary: int = 0  # which of the model's rotary angles it has

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise UserError(
                f"{self.heads} query heads do not share {self.kv_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim={self.head_dim}: rotary embedding needs an even number")

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale

    @property
    def rope_frequency(self) -> Float[np.ndarray, " H/2"]:
        """Of each rotary pair: the angle by which it turns from one position to the next."""
        return _frequency(self.rope_theta, self.rope_divisors, self.head_dim)

    @property
    def rope_frequencies(self) -> Float[np.ndarray, "R H/2"]:
        """The same for each of the model's rotary angles: of all layers, and of local ones."""
        ropes = [self.rope_frequency]
        if self.local is not None:
            local = self.local
            ropes.append(_frequency(local.rope_theta, local.rope_divisors, self.head_dim))
        return np.stack(ropes)

    @property
    def latent_width(self) -> int | None:
        """Channels of a token's latent, if values are latents."""
        return None if self.latent is None else self.latent.width

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of every layer; nothing where all layers see everything."""
        if self.local is None:
            return ()
        return tuple(self.layer(layer).window for layer in range(self.layers))

    def layer(self, layer: int) -> "ModelConfig":
        """The architecture of one layer: layers with equal ones share a program."""
        local = self.local is not None and layer in self.local.layers
        dense = self.experts is not None and layer in self.experts.dense_layers
        return _layer(self, local, dense) if self.local or self.experts else self


def _frequency(theta: float, divisors: tuple[float, ...], head_dim: int) -> np.ndarray:
    exponent = np.arange(len(divisors)) * 2.0 / (2 * len(divisors))
    turning = (theta**-exponent / np.asarray(divisors)).astype(np.float32)
    return np.pad(turning, (0, head_dim // 2 - len(divisors)))


@functools.lru_cache(maxsize=256)
def _layer(config: ModelConfig, local: bool, dense: bool) -> ModelConfig:
    own: dict[str, Any] = {"local": None}
    if local and config.local is not None:
        own |= {
            "window": config.local.window,
            "rope_theta": config.local.rope_theta,
            "rope_divisors": config.local.rope_divisors,
            "rotary": 1,
        }
    if config.experts is not None:
        experts = dataclasses.replace(config.experts, dense_layers=())
        own["experts"] = None if dense else experts
    return dataclasses.replace(config, **own)


def config_from_fields(fields: Mapping[str, Any]) -> ModelConfig:
    """The config whose ``dataclasses.asdict`` went through JSON."""

    def tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}

    own = tuples(fields)
    if own.get("local") is not None:
        own["local"] = LocalLayers(**tuples(own["local"]))
    if own.get("experts") is not None:
        own["experts"] = Experts(**tuples(own["experts"]))
    if own.get("latent") is not None:
        own["latent"] = Latent(**own["latent"])
    return ModelConfig(**own)
