"""Mixtral: Mistral with experts."""

import dataclasses
from typing import Any

from jkvq.models.config import Experts, ModelConfig
from jkvq.models.families.family import Family, GGUFForm
from jkvq.models.fields import Fields, count


def _read(fields: Fields, base: ModelConfig) -> ModelConfig:
    experts = Experts(
        number=count(fields, "num_local_experts"),
        chosen=count(fields, "num_experts_per_tok"),
        width=base.mlp_width,
    )
    return dataclasses.replace(base, experts=experts)


def _gguf_fields(metadata: Fields) -> dict[str, Any]:
    return {
        "num_local_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
    }


_EXPERT = "model.layers.{layer}.block_sparse_moe.experts.{expert}"
MIXTRAL = Family(
    "mixtral",
    _read,
    names={
        "mlp.router": "model.layers.{layer}.block_sparse_moe.gate",
        "mlp.experts.gate": f"{_EXPERT}.w1",
        "mlp.experts.up": f"{_EXPERT}.w3",
        "mlp.experts.down": f"{_EXPERT}.w2",
    },
    # llama.cpp calls it llama; it has experts.
    gguf=GGUFForm("llama", _gguf_fields, interleaved=True),
)
