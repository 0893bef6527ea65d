"""Phi 3 and 4: projections that are joined in the checkpoint too; some have longrope."""

from jkvq.models.families.family import Family, GGUFForm

PHI3 = Family(
    "phi3",
    names={
        "attention.qkv": "model.layers.{layer}.self_attn.qkv_proj",
        "mlp.gate_up": "model.layers.{layer}.mlp.gate_up_proj",
    },
    gguf=GGUFForm("phi3"),
)
