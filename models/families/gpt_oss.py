"""gpt-oss: sinks, every other layer local, experts with biases and a clamped gate."""

import dataclasses
from typing import Any

import numpy as np

from jkvq.models.config import Experts, LocalLayers, ModelConfig
from jkvq.models.families.family import Family, GGUFForm, Read
from jkvq.models.fields import Fields, count, positive
from jkvq.models.rope import read_rope, rope_fields

_THETA = 150000.0


def _read(fields: Fields, base: ModelConfig) -> ModelConfig:
    bias = bool(fields.get("attention_bias", True))
    rope = read_rope(rope_fields(fields), base.head_dim, base.context, _THETA)
    experts = Experts(
        number=count(fields, "num_local_experts"),
        chosen=count(fields, "num_experts_per_tok"),
        width=base.mlp_width,
        bias=True,
        clamp=positive(fields, "swiglu_limit", 7.0),
        sharpness=positive(fields, "swiglu_alpha", 1.702),
    )
    kinds = fields.get("layer_types") or ["sliding_attention", "full_attention"] * base.layers
    layers = tuple(n for n in range(base.layers) if kinds[n] == "sliding_attention")
    local = LocalLayers(layers, count(fields, "sliding_window", 128), rope.theta, rope.divisors)
    return dataclasses.replace(
        base,
        rope_theta=rope.theta,
        rope_divisors=rope.divisors,
        rope_gain=rope.gain,
        qk_bias=bias,
        v_bias=bias,
        out_bias=bias,
        sinks=True,
        local=local if layers else None,
        experts=experts,
    )


def _reading(read: Read) -> Read:
    """Matrices of experts as [out, in], all gates before the ups that they alternate with."""

    def tensor(name: str) -> np.ndarray:
        if ".experts." not in name:
            return read(name)
        base, _, kind = name.rpartition(".")
        found = read(base).swapaxes(1, 2) if kind == "weight" else read(f"{base}_bias")
        if base.endswith("gate_up_proj"):
            return np.concatenate([found[:, 0::2], found[:, 1::2]], axis=1)
        return found

    return tensor


def _gguf_fields(metadata: Fields) -> dict[str, Any]:
    return {
        "num_local_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
        "sliding_window": metadata["attention.sliding_window"],
        "rope_parameters": {
            "rope_type": metadata["rope.scaling.type"],
            "rope_theta": metadata["rope.freq_base"],
            "factor": metadata["rope.scaling.factor"],
            "original_max_position_embeddings": metadata["rope.scaling.original_context_length"],
            "truncate": False,  # as all of them are made
        },
    }


_EXPERTS = "model.layers.{layer}.mlp.experts"
GPT_OSS = Family(
    "gpt_oss",
    _read,
    names={
        "attention.sinks": "model.layers.{layer}.self_attn.sinks",
        "mlp.router": "model.layers.{layer}.mlp.router",
        "mlp.experts.gate_up": f"{_EXPERTS}.gate_up_proj",
        "mlp.experts.gate": f"{_EXPERTS}.gate_proj",  # apart in GGUF
        "mlp.experts.up": f"{_EXPERTS}.up_proj",
        "mlp.experts.down": f"{_EXPERTS}.down_proj",
    },
    window="own",
    reading=_reading,
    gguf=GGUFForm("gpt-oss", _gguf_fields),
)
