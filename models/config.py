"""What a checkpoint says about its architecture, in one vocabulary for every family.

``from_hf`` reads a config.json, ``from_gguf`` the metadata of a GGUF file. Everything comes from
the checkpoint; what the decoder cannot do is refused here, before any weight is read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from jkvq.cache.shape import CacheShape
from jkvq.support.errors import UserError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


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
    rope_divisors: tuple[float, ...]  # [H / 2] what each rotary frequency is divided by
    tied: bool = False  # the embedding is also the output head
    qk_bias: bool = False
    v_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise UserError(
                f"{self.heads} query heads do not share {self.kv_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim={self.head_dim}: rotary embedding needs an even number")

    @property
    def rope_frequency(self) -> Float[np.ndarray, " H/2"]:
        """Of each rotary pair: the angle by which it turns from one position to the next."""
        exponent = np.arange(self.head_dim // 2) * 2.0 / self.head_dim
        frequency = self.rope_theta**-exponent / np.asarray(self.rope_divisors)
        return frequency.astype(np.float32)

    @property
    def attention_scale(self) -> float:
        """What q . k is multiplied by before the softmax."""
        return self.head_dim**-0.5

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(self.layers, self.kv_heads, self.head_dim)


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The architecture of a Hugging Face ``config.json``."""
    try:
        return _from_hf(config)
    except KeyError as error:
        raise UserError(f"config.json has no {error}, which a model needs") from None


def _from_hf(config: Mapping[str, Any]) -> ModelConfig:
    family = _supported(config.get("model_type"))
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"hidden_act={activation!r}: only 'silu' is supported")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    # Before transformers 5 the theta and the scaling stood apart; since then both are in one.
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        family=family,
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        mlp_width=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=head_dim,
        vocab=config["vocab_size"],
        context=_hf_context(config),
        norm_eps=config["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rope_divisors=_rope_divisors(rope, head_dim, config),
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_bias=family == "qwen2" or bias,
        v_bias=family == "qwen2" or bias,
        out_bias=bias and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
    )


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """The architecture in GGUF metadata and tensor shapes, without the rope_freqs tensor.

    A llama.cpp file keeps Llama 3's rope scaling as a tensor of divisors; its reader adds it.
    """
    family = _supported(metadata.get("general.architecture"))
    if "token_embd.weight" not in tensors:
        raise UserError("the GGUF file has no tensor 'token_embd.weight'")

    def get(key: str, default: Any = None):
        value = metadata.get(f"{family}.{key}", default)
        if value is None:
            raise UserError(f"the GGUF metadata has no '{family}.{key}'")
        return value

    scaling = metadata.get(f"{family}.rope.scaling.type", "none")
    rope = {"rope_type": "default"}
    if scaling != "none":
        rope = {"rope_type": scaling, "factor": metadata.get(f"{family}.rope.scaling.factor")}
    heads, width = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", width // heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise UserError(
            f"rope.dimension_count={get('rope.dimension_count')}: partial rotary embedding "
            f"(head_dim {head_dim}) is not supported"
        )
    return ModelConfig(
        family=family,
        layers=get("block_count"),
        width=width,
        mlp_width=get("feed_forward_length"),
        heads=heads,
        kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=tensors["token_embd.weight"][0],
        context=min(get("context_length"), get("attention.sliding_window", math.inf)),
        norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=get("rope.freq_base", 10000.0),
        rope_divisors=_rope_divisors(rope, head_dim, {}),
        tied="output.weight" not in tensors,
        qk_bias="blk.0.attn_q.bias" in tensors,
        v_bias="blk.0.attn_v.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    )


def _supported(family: str | None) -> str:
    if family not in FAMILIES:
        raise UserError(
            f"architecture '{family}' is not supported; supported: {', '.join(FAMILIES)}"
        )
    return family


def _hf_context(config: Mapping[str, Any]) -> int:
    """The model's context, cut to a sliding window: up to there it attends to everything."""
    always = config["model_type"] not in ("qwen2", "qwen3")  # those use a window only when told to
    window = config.get("sliding_window") if config.get("use_sliding_window", always) else None
    return min(config["max_position_embeddings"], window or math.inf)


def _rope_divisors(
    rope: Mapping[str, Any], head_dim: int, config: Mapping[str, Any]
) -> tuple[float, ...]:
    """What each of the H / 2 rotary frequencies is divided by under a scaling rule."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    half = head_dim // 2
    if {**config, **rope}.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UserError("partial rotary embedding is not supported")
    if kind == "default":
        return (1.0,) * half
    if kind == "linear":
        return (float(rope["factor"]),) * half
    if kind == "llama3":
        theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
        return tuple(_llama3_divisor(theta ** (-2 * i / head_dim), rope) for i in range(half))
    raise UserError(f"rope scaling '{kind}' is not supported; supported: default, linear, llama3")


def _llama3_divisor(frequency: float, rope: Mapping[str, Any]) -> float:
    """Llama 3.1's rule: long waves are slowed by ``factor``, short ones kept, a ramp between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    return 1.0 / (kept + (1.0 - kept) / rope["factor"])
