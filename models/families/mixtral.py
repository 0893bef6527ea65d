"""Mixtral: Mistral with experts."""

import dataclasses

from jkvq.models.config import Experts, ModelConfig
from jkvq.models.families.family import Family
from jkvq.models.fields import Fields, count


def _read(fields: Fields, base: ModelConfig) -> ModelConfig:
    experts = Experts(
        number=count(fields, "num_local_experts"),
        chosen=count(fields, "num_experts_per_tok"),
        width=base.mlp_width,
    )
    return dataclasses.replace(base, experts=experts)


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
)
