"""OLMo 2: norms after attention and feed-forward blocks, and over all heads of queries and keys."""

import dataclasses

from jkvq.models.config import ModelConfig
from jkvq.models.families.family import Family, GGUFForm
from jkvq.models.fields import Fields


def _read(fields: Fields, base: ModelConfig) -> ModelConfig:
    del fields
    return dataclasses.replace(
        base, qk_norm=True, qk_norm_whole=True, pre_norm=False, post_norm=True
    )


OLMO2 = Family(
    "olmo2",
    _read,
    names={
        "attention_out_norm": "model.layers.{layer}.post_attention_layernorm",
        "mlp_out_norm": "model.layers.{layer}.post_feedforward_layernorm",
    },
    gguf=GGUFForm("olmo2"),
)
