"""GLM-4: half of a head's channels turn. GLM-4 MoE: experts by sigmoids, and a shared one."""

import dataclasses
from typing import Any

from jkvq.models.config import Experts, ModelConfig
from jkvq.models.families.family import EXPERT_NAMES, Family, GGUFForm
from jkvq.models.fields import Fields, count, positive
from jkvq.models.rope import read_rope, rope_fields


def _half_rotary(fields: Fields, base: ModelConfig) -> ModelConfig:
    """Half of the channels turn where the config does not say; the output has no bias."""
    base, rope = dataclasses.replace(base, out_bias=False), rope_fields(fields)
    if "partial_rotary_factor" in rope:
        return base
    found = read_rope({"partial_rotary_factor": 0.5, **rope}, base.head_dim, base.context)
    return dataclasses.replace(base, rope_divisors=found.divisors, rope_gain=found.gain)


def _read_glm4(fields: Fields, base: ModelConfig) -> ModelConfig:
    bias = bool(fields.get("attention_bias", True))
    base = dataclasses.replace(base, qk_bias=bias, v_bias=bias, post_norm=True)
    return _half_rotary(fields, base)


def _read_glm4_moe(fields: Fields, base: ModelConfig) -> ModelConfig:
    width = count(fields, "moe_intermediate_size")
    experts = Experts(
        number=count(fields, "n_routed_experts"),
        chosen=count(fields, "num_experts_per_tok"),
        width=width,
        scores="sigmoid",
        normalized=bool(fields.get("norm_topk_prob", True)),
        scale=positive(fields, "routed_scaling_factor", 1.0),
        corrected=True,
        groups=count(fields, "n_group", 1),
        chosen_groups=count(fields, "topk_group", 1),
        shared_width=width * count(fields, "n_shared_experts", 1),
        dense_layers=tuple(range(fields.get("first_k_dense_replace", 1))),
    )
    base = dataclasses.replace(
        base,
        layers=count(fields, "num_hidden_layers"),
        qk_norm=bool(fields.get("use_qk_norm")),
        experts=experts,
    )
    return _half_rotary(fields, base)


def _gguf_rotary(metadata: Fields) -> dict[str, Any]:
    """The part of a head that turns; llama.cpp keeps how many channels that are."""
    rotary, head_dim = (metadata[key] for key in ("rope.dimension_count", "attention.key_length"))
    return {"partial_rotary_factor": rotary / head_dim}


def _gguf_glm4_moe(metadata: Fields) -> dict[str, Any]:
    own = {
        "num_hidden_layers": metadata["block_count"] - metadata.get("nextn_predict_layers", 0),
        "moe_intermediate_size": metadata["expert_feed_forward_length"],
        "n_routed_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
        "n_shared_experts": metadata["expert_shared_count"],
        "norm_topk_prob": metadata.get("expert_weights_norm", True),
        "routed_scaling_factor": metadata.get("expert_weights_scale", 1.0),
        "n_group": metadata.get("expert_group_count", 1),
        "topk_group": metadata.get("expert_group_used_count", 1),
        "first_k_dense_replace": metadata.get("leading_dense_block_count", 0),
    }
    return {**own, **_gguf_rotary(metadata)}


GLM4 = Family(
    "glm4",
    _read_glm4,
    names={
        "attention_out_norm": "model.layers.{layer}.post_self_attn_layernorm",
        "mlp_out_norm": "model.layers.{layer}.post_mlp_layernorm",
        "mlp.gate_up": "model.layers.{layer}.mlp.gate_up_proj",
    },
    interleaved=True,
    gguf=GGUFForm("glm4", _gguf_rotary, interleaved=True),
)
GLM4_MOE = Family(
    "glm4_moe",
    _read_glm4_moe,
    names={
        **EXPERT_NAMES,
        "mlp.router.correction": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
        "mlp.shared.gate": "model.layers.{layer}.mlp.shared_experts.gate_proj",
        "mlp.shared.up": "model.layers.{layer}.mlp.shared_experts.up_proj",
        "mlp.shared.down": "model.layers.{layer}.mlp.shared_experts.down_proj",
    },
    gguf=GGUFForm("glm4moe", _gguf_glm4_moe),
)
