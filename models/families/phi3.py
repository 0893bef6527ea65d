"""Phi 3 and 4: projections that are joined in the checkpoint too; some have longrope."""

import dataclasses

from jkvq.models.config import ModelConfig
from jkvq.models.families.family import Family
from jkvq.models.fields import Fields
from jkvq.models.rope import read_rope, rope_fields

_LONGROPE = ("su", "yarn")  # what checkpoints called it before it had its name


def _read(fields: Fields, base: ModelConfig) -> ModelConfig:
    rope = rope_fields(fields)
    if (rope.get("rope_type") or rope.get("type")) in _LONGROPE:
        rope |= {"rope_type": "longrope"}
    found = read_rope(rope, base.head_dim, fields["max_position_embeddings"])
    return dataclasses.replace(
        base, rope_theta=found.theta, rope_divisors=found.divisors, rope_gain=found.gain
    )


PHI3 = Family(
    "phi3",
    _read,
    names={
        "attention.qkv": "model.layers.{layer}.self_attn.qkv_proj",
        "mlp.gate_up": "model.layers.{layer}.mlp.gate_up_proj",
    },
)
