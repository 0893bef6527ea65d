"""DeepSeek V2 and V2 Lite: latents instead of keys and values (MLA), experts, and shared ones."""

import dataclasses
import math

from jkvq.models.config import Experts, Latent, ModelConfig
from jkvq.models.families.family import EXPERT_NAMES, Family
from jkvq.models.fields import Fields, count, positive
from jkvq.models.rope import read_rope, rope_fields
from jkvq.support.errors import UserError


def _read(fields: Fields, base: ModelConfig) -> ModelConfig:
    head_dim, rope = count(fields, "qk_rope_head_dim"), rope_fields(fields)
    found = read_rope(rope, head_dim, base.context)
    latent = Latent(
        width=count(fields, "kv_lora_rank"),
        key=count(fields, "qk_nope_head_dim"),
        value=count(fields, "v_head_dim"),
        query_rank=None if fields.get("q_lora_rank") is None else count(fields, "q_lora_rank"),
    )
    bias = bool(fields.get("attention_bias", False))
    return dataclasses.replace(
        base,
        kv_heads=1,
        head_dim=head_dim,
        rope_theta=found.theta,
        rope_divisors=found.divisors,
        rope_gain=found.gain,
        score_scale=_scale(rope, latent.key + head_dim),
        qk_bias=False,
        v_bias=False,
        out_bias=bias,
        latent=latent,
        experts=_experts(fields),
    )


def _scale(rope: Fields, channels: int) -> float:
    """That of a head's channels, with YaRN's gain of all of them, where it has one."""
    kind, all_channels = rope.get("rope_type") or rope.get("type"), rope.get("mscale_all_dim")
    if kind in (None, "default") or not all_channels or rope["factor"] <= 1:
        return channels**-0.5
    return channels**-0.5 * (0.1 * all_channels * math.log(rope["factor"]) + 1) ** 2


def _experts(fields: Fields) -> Experts:
    method = fields.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UserError(
            f"topk_method={method!r} is not supported; supported: greedy, group_limited_greedy"
        )
    width, grouped = count(fields, "moe_intermediate_size"), method != "greedy"
    return Experts(
        number=count(fields, "n_routed_experts"),
        chosen=count(fields, "num_experts_per_tok"),
        width=width,
        normalized=False,
        scale=positive(fields, "routed_scaling_factor", 1.0),
        groups=count(fields, "n_group") if grouped else 1,
        chosen_groups=count(fields, "topk_group") if grouped else 1,
        best_of_group=1,
        shared_width=width * count(fields, "n_shared_experts", 2),
        dense_layers=tuple(range(fields.get("first_k_dense_replace", 0))),
    )


_ATTENTION = "model.layers.{layer}.self_attn"
DEEPSEEK_V2 = Family(
    "deepseek_v2",
    _read,
    names={
        **EXPERT_NAMES,
        "attention.q_a": f"{_ATTENTION}.q_a_proj",
        "attention.q_norm": f"{_ATTENTION}.q_a_layernorm",
        "attention.q_b": f"{_ATTENTION}.q_b_proj",
        "attention.kv_a": f"{_ATTENTION}.kv_a_proj_with_mqa",
        "attention.kv_norm": f"{_ATTENTION}.kv_a_layernorm",
        "attention.kv_b": f"{_ATTENTION}.kv_b_proj",
        "mlp.shared.gate": "model.layers.{layer}.mlp.shared_experts.gate_proj",
        "mlp.shared.up": "model.layers.{layer}.mlp.shared_experts.up_proj",
        "mlp.shared.down": "model.layers.{layer}.mlp.shared_experts.down_proj",
    },
    interleaved=True,
    window="own",
)
