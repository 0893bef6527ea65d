"""Small random checkpoints that the tests of models/ share."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

_SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 0.01,  # large enough that a forgotten one shows
}

# Waves of 6, 20, 63, 199, ... tokens: one is kept, two are on the ramp, the others are slowed.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 6,
    "long_factor": [1.0, 1.1, 1.5, 2.0, 4.0, 8.0],
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_NO_PADDING = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}

# Name of the case -> family, and what its config says besides _SMALL.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-tied": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}

# Of the families that came later; tests/models/test_families.py runs them.
FAMILY_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-yarn": ("qwen3", {"head_dim": 32, "rope_parameters": YARN_ROPE}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {"original_max_position_embeddings": 256, **_NO_PADDING}),
    # Its context is long: with 29 tokens transformers too takes the factors for long texts.
    "phi4-mini": (
        "phi3",
        {
            "head_dim": 16,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 6,
            "rope_parameters": LONGROPE,
            **_NO_PADDING,
        },
    ),
    "glm4": ("glm4", {"head_dim": 16, **_NO_PADDING}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "qwen2_moe",
        {**_EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    ),
    "qwen3-moe": ("qwen3_moe", {**_EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "glm4-moe": (
        "glm4_moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 3.0,
            **_NO_PADDING,
        },
    ),
}


def config_dict(case: str = "llama") -> dict[str, Any]:
    """A config.json, without transformers."""
    family, changes = (CASES | FAMILY_CASES)[case]
    return {"model_type": family, "hidden_act": "silu", **_SMALL, **changes}


def save_random_model(case: str, folder: Path, **options) -> Any:
    """Writes a Hugging Face folder of random weights, and returns transformers' model of it.

    transformers leaves norms at 1 and biases at 0, which would hide a swapped one: all are random.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, changes = (CASES | FAMILY_CASES)[case]
    config = AutoConfig.for_model(family, **_SMALL | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)

    def random(name: str, shape: torch.Size) -> torch.Tensor:
        if "norm" in name:
            return torch.rand(shape, generator=generator) + 0.5
        spread = 1.0 if "embed" in name or name.endswith("bias") else shape[-1] ** -0.5
        return torch.randn(shape, generator=generator) * spread

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(random(name, parameter.shape))
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):  # of routers
                buffer.copy_(random(name, buffer.shape))
    model.save_pretrained(folder, **options)
    return model


def write_gguf(path: Path, model: Any, *, architecture: str, rope_factors=None) -> None:
    """Writes transformers' model as llama.cpp's converter does, in float32.

    rope_factors: what each rotary frequency is divided by, as llama.cpp spells out Llama 3's rule.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().numpy()
        projection = name.split(".")[-2]
        if architecture == "llama" and projection in heads:
            tensor = interleave(tensor, heads[projection])
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None
        writer.add_tensor(target, tensor)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_factors, np.float32))
    finish(writer)


def interleave(tensor: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of query and key rows: the two channels of a rotary pair side by side."""
    halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes what was added, and closes the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
