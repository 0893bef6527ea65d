"""Qwen 2 and 2.5: a bias on queries, keys and values. Qwen 3: norms on queries and keys."""

import dataclasses

from jkvq.models.config import ModelConfig
from jkvq.models.families.family import Family, GGUFForm
from jkvq.models.fields import Fields


def _read_qwen2(fields: Fields, base: ModelConfig) -> ModelConfig:
    del fields
    return dataclasses.replace(base, qk_bias=True, v_bias=True, out_bias=False)


def _read_qwen3(fields: Fields, base: ModelConfig) -> ModelConfig:
    del fields
    return dataclasses.replace(base, qk_norm=True)


QWEN2 = Family("qwen2", _read_qwen2, window="told", gguf=GGUFForm("qwen2"))
QWEN3 = Family("qwen3", _read_qwen3, window="told", gguf=GGUFForm("qwen3"))
