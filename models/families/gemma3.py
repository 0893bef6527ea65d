"""Gemma 3: layers of two kinds, most of which see a window only, and norms of 1 + weight."""

import dataclasses
from typing import Any

from jkvq.models.config import LocalLayers, ModelConfig
from jkvq.models.families.family import Family, GGUFForm
from jkvq.models.fields import Fields, count, positive
from jkvq.models.rope import read_rope, rope_fields
from jkvq.support.errors import UserError

_THETA, _LOCAL_THETA = 1e6, 1e4
_PATTERN = 6  # every so many layers one sees everything
_LAYERS_OF_27B = 62


def _read(fields: Fields, base: ModelConfig) -> ModelConfig:
    if fields.get("attn_logit_softcapping") is not None:
        raise UserError("attn_logit_softcapping: attention with capped scores is not supported")
    if fields.get("use_bidirectional_attention"):
        raise UserError("use_bidirectional_attention: only attention to the past is supported")
    cap = fields.get("final_logit_softcapping")
    rope = read_rope(rope_fields(fields), base.head_dim, base.context, _THETA)
    return dataclasses.replace(
        base,
        rope_theta=rope.theta,
        rope_divisors=rope.divisors,
        activation=fields.get("hidden_activation", "gelu_pytorch_tanh"),
        tied=bool(fields.get("tie_word_embeddings", True)),
        qk_norm=True,
        post_norm=True,
        norm_of_one=True,
        embedding_scale=base.width**0.5,
        score_scale=positive(fields, "query_pre_attn_scalar", 256) ** -0.5,
        logit_cap=None if cap is None else positive(fields, "final_logit_softcapping"),
        local=_local(fields, base),
    )


def _local(fields: Fields, base: ModelConfig) -> LocalLayers | None:
    pattern = count(fields, "sliding_window_pattern", _PATTERN)
    kinds = fields.get("layer_types") or [
        "sliding_attention" if (layer + 1) % pattern else "full_attention"
        for layer in range(base.layers)
    ]
    layers = tuple(n for n, kind in enumerate(kinds) if kind == "sliding_attention")
    if not layers:
        return None
    own = {"rope_theta": fields.get("rope_local_base_freq") or _LOCAL_THETA}
    if isinstance((fields.get("rope_parameters") or {}).get("sliding_attention"), dict):
        own |= fields["rope_parameters"]["sliding_attention"]
    rope = read_rope(own, base.head_dim, base.context)
    return LocalLayers(layers, count(fields, "sliding_window"), rope.theta, rope.divisors)


def _gguf_fields(metadata: Fields) -> dict[str, Any]:
    found = {
        "sliding_window": metadata.get("attention.sliding_window"),
        "sliding_window_pattern": metadata.get("attention.sliding_window_pattern"),
        "rope_theta": metadata.get("rope.freq_base"),
        "rope_local_base_freq": metadata.get("rope.freq_base_swa"),
        "query_pre_attn_scalar": _scaled_by(metadata),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }
    if metadata.get("rope.scaling.type", "none") != "none":
        kind, factor = metadata["rope.scaling.type"], metadata.get("rope.scaling.factor")
        found["rope_scaling"] = {"rope_type": kind, "factor": factor}
    return {name: value for name, value in found.items() if value is not None}


def _scaled_by(metadata: Fields) -> float | None:
    """What files leave out: it is the head's size but for the model of 27B, as in llama.cpp."""
    if metadata.get("block_count") == _LAYERS_OF_27B:
        return metadata["embedding_length"] / metadata["attention.head_count"]
    return metadata.get("attention.key_length")


GEMMA3 = Family(
    "gemma3_text",
    _read,
    names={
        "attention_out_norm": "model.layers.{layer}.post_attention_layernorm",
        "mlp_norm": "model.layers.{layer}.pre_feedforward_layernorm",
        "mlp_out_norm": "model.layers.{layer}.post_feedforward_layernorm",
    },
    window="own",
    gguf=GGUFForm("gemma3", _gguf_fields, norms_with_one=True),
)
