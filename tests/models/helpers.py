"""Small random checkpoints that the tests of models/ share."""

import math
from collections.abc import Iterator
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
_LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
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
    "qwen2-moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 40}),
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
            "sliding_window": 18,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 3.0,
            **_NO_PADDING,
        },
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            **_LATENT,
            "rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.5},
        },
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "attention_bias": True,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            **_LATENT,
        },
    ),
    "mistral-window": ("mistral", {"sliding_window": 11}),
    "qwen3-window": (
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 1,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "sliding_window": 11,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "swiglu_limit": 0.7,  # small enough that it clamps
            "swiglu_alpha": 1.3,
            "rope_parameters": YARN_ROPE | {"truncate": False},
        },
    ),
}


def config_dict(case: str = "llama") -> dict[str, Any]:
    """A config.json, without transformers."""
    family, changes = (CASES | FAMILY_CASES)[case]
    return {"model_type": family, **_SMALL, **changes}


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
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        part = rope.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(config.head_dim * part))
    _add_own_fields(writer, config)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in _converted(model, architecture):
        projection = name.split(".")[-2]
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None
        if architecture == "llama" and projection in heads:
            writer.add_tensor(target, interleave(tensor, heads[projection]))
        else:
            writer.add_tensor(target, tensor)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_factors, np.float32))
    finish(writer)


def _add_own_fields(writer: gguf.GGUFWriter, config: Any) -> None:
    """What only some families have."""
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "glm4_moe":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(2)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        original = config.rope_parameters["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
    if config.rope_parameters.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        context, original = config.max_position_embeddings, config.original_max_position_embeddings
        writer.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(context / original) / math.log(original))
        )
        for length in ("long", "short"):
            factors = np.asarray(config.rope_parameters[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


def _converted(model: Any, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of transformers' model by the names that llama.cpp's converter looks up."""
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().numpy()
        if architecture == "gemma3" and "norm" in name:
            tensor = tensor + 1
        if architecture == "gpt-oss" and ".experts." in name:
            yield from _converted_gpt_oss(name, tensor)
        elif name.endswith("self_attn.sinks"):
            yield f"{name}.weight", tensor
        elif name.endswith("experts.gate_up_proj"):
            half = tensor.shape[1] // 2
            yield name.replace("gate_up_proj", "gate_proj.weight"), tensor[:, :half]
            yield name.replace("gate_up_proj", "up_proj.weight"), tensor[:, half:]
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", tensor
        else:
            yield name, tensor
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            yield name.replace("correction_bias", "correction.bias"), buffer.numpy()


def _converted_gpt_oss(name: str, tensor: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Of its experts: gates and ups apart, matrices [out, in], biases by their name."""
    kind = "bias" if name.endswith("_bias") else "weight"
    base, tensor = name.removesuffix("_bias"), tensor if kind == "bias" else tensor.swapaxes(1, 2)
    if not base.endswith("gate_up_proj"):
        yield f"{base}.{kind}", np.ascontiguousarray(tensor)
        return
    for number, part in enumerate(("gate", "up")):
        own = np.ascontiguousarray(tensor[:, number::2])
        yield f"{base.replace('gate_up', part)}.{kind}", own


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
