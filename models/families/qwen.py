"""Qwen 2: a bias on queries, keys, values. Qwen 3: norms on queries, keys. With experts too."""

import dataclasses
from typing import Any

from jkvq.models.config import Experts, ModelConfig
from jkvq.models.families.family import EXPERT_NAMES, Family, GGUFForm
from jkvq.models.fields import Fields, count


def _read_qwen2(fields: Fields, base: ModelConfig) -> ModelConfig:
    del fields
    return dataclasses.replace(base, qk_bias=True, v_bias=True, out_bias=False)


def _read_qwen3(fields: Fields, base: ModelConfig) -> ModelConfig:
    del fields
    return dataclasses.replace(base, qk_norm=True)


def _experts(fields: Fields, base: ModelConfig) -> Experts:
    step, dense = count(fields, "decoder_sparse_step", 1), fields.get("mlp_only_layers") or ()
    return Experts(
        number=count(fields, "num_experts", fields.get("num_local_experts")),
        chosen=count(fields, "num_experts_per_tok"),
        width=count(fields, "moe_intermediate_size"),
        normalized=bool(fields.get("norm_topk_prob", False)),
        dense_layers=tuple(n for n in range(base.layers) if n in dense or (n + 1) % step),
    )


def _read_qwen2_moe(fields: Fields, base: ModelConfig) -> ModelConfig:
    shared = count(fields, "shared_expert_intermediate_size")
    bias = bool(fields.get("qkv_bias", True))
    experts = dataclasses.replace(_experts(fields, base), shared_width=shared, shared_gate=True)
    return dataclasses.replace(base, qk_bias=bias, v_bias=bias, out_bias=False, experts=experts)


def _read_qwen3_moe(fields: Fields, base: ModelConfig) -> ModelConfig:
    return dataclasses.replace(base, qk_norm=True, experts=_experts(fields, base))


def _gguf_fields(metadata: Fields) -> dict[str, Any]:
    return {
        "num_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
        "moe_intermediate_size": metadata["expert_feed_forward_length"],
    }


def _gguf_qwen2_moe(metadata: Fields) -> dict[str, Any]:
    shared = metadata["expert_shared_feed_forward_length"]
    return {**_gguf_fields(metadata), "shared_expert_intermediate_size": shared}


def _gguf_qwen3_moe(metadata: Fields) -> dict[str, Any]:
    return {**_gguf_fields(metadata), "norm_topk_prob": True}  # as llama.cpp has it


QWEN2 = Family("qwen2", _read_qwen2, window="told", gguf=GGUFForm("qwen2"))
QWEN3 = Family("qwen3", _read_qwen3, window="told", gguf=GGUFForm("qwen3"))
QWEN2_MOE = Family(
    "qwen2_moe",
    _read_qwen2_moe,
    names={
        **EXPERT_NAMES,
        "mlp.shared.gate": "model.layers.{layer}.mlp.shared_expert.gate_proj",
        "mlp.shared.up": "model.layers.{layer}.mlp.shared_expert.up_proj",
        "mlp.shared.down": "model.layers.{layer}.mlp.shared_expert.down_proj",
        "mlp.shared_gate": "model.layers.{layer}.mlp.shared_expert_gate",
    },
    window="told",
    gguf=GGUFForm("qwen2moe", _gguf_qwen2_moe),
)
QWEN3_MOE = Family(
    "qwen3_moe",
    _read_qwen3_moe,
    names=EXPERT_NAMES,
    window="told",
    gguf=GGUFForm("qwen3moe", _gguf_qwen3_moe),
)
