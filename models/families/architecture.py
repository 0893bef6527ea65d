"""From a checkpoint's own description to an architecture: which family it is, and what it has.

``from_hf`` reads a config.json, ``from_gguf`` the metadata of a GGUF file. What the decoder cannot
do is refused here, before any weight is read.
"""

import dataclasses
from collections.abc import Mapping

from jkvq.models.config import LocalLayers, ModelConfig
from jkvq.models.families.deepseek_v2 import DEEPSEEK_V2
from jkvq.models.families.family import Family
from jkvq.models.families.gemma3 import GEMMA3
from jkvq.models.families.glm4 import GLM4, GLM4_MOE
from jkvq.models.families.gpt_oss import GPT_OSS
from jkvq.models.families.llama import LLAMA, MISTRAL
from jkvq.models.families.mixtral import MIXTRAL
from jkvq.models.families.olmo2 import OLMO2
from jkvq.models.families.phi3 import PHI3
from jkvq.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from jkvq.models.fields import Fields, count, positive
from jkvq.models.layers.mlp import ACTIVATIONS
from jkvq.models.rope import THETA, Rope, read_rope, rope_fields
from jkvq.support.errors import UserError

_ALL = (
    *(LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE),
    *(GEMMA3, GLM4, GLM4_MOE, OLMO2, PHI3, GPT_OSS, DEEPSEEK_V2),
)
_FIRST_LAYERS = 28  # without a window, where a config that is asked for them does not say
FAMILIES = {family.name: family for family in _ALL}
# llama.cpp's name of an architecture; Mixtral has llama's.
GGUF_FAMILIES = {
    family.gguf.architecture: family for family in _ALL if family.gguf and family is not MIXTRAL
}


def from_hf(config: Fields) -> ModelConfig:
    """The architecture of a Hugging Face ``config.json``."""
    family = _supported(config.get("model_type"), FAMILIES)
    try:
        return family.read(config, _llama_from_hf(config, family))
    except KeyError as error:
        raise UserError(f"config.json has no {error}, which a model needs") from None


def _llama_from_hf(config: Fields, family: Family) -> ModelConfig:
    """What the config would be of llama."""
    width, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    head_dim = count(config, "head_dim", width // heads)
    context = count(config, "max_position_embeddings")
    rope = read_rope(rope_fields(config), head_dim, context)
    bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        family=family.name,
        layers=count(config, "num_hidden_layers"),
        width=width,
        mlp_width=count(config, "intermediate_size"),
        heads=heads,
        kv_heads=count(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        vocab=count(config, "vocab_size"),
        context=context,
        norm_eps=positive(config, "rms_norm_eps"),
        rope_theta=rope.theta,
        rope_divisors=rope.divisors,
        rope_gain=rope.gain,
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_bias=bias,
        v_bias=bias,
        out_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        activation=_activation(config),
        local=_local(config, family, rope),
    )


def _activation(config: Fields):
    name = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    if name not in ACTIVATIONS:
        allowed = " and ".join(map(repr, ACTIVATIONS))
        raise UserError(f"hidden_act={name!r}: only {allowed} are supported")
    return name


def _local(config: Fields, family: Family, rope: Rope) -> LocalLayers | None:
    """The layers with a sliding window: those that a config names, or all behind the first ones."""
    context, layers = config["max_position_embeddings"], config["num_hidden_layers"]
    if family.window == "own" or not config.get("use_sliding_window", family.window == "all"):
        return None
    window = count(config, "sliding_window", context)
    first = config.get("max_window_layers", _FIRST_LAYERS) if family.window == "told" else 0
    kinds = config.get("layer_types")
    local = range(first, layers)
    if kinds:
        local = (n for n, kind in enumerate(kinds[:layers]) if kind == "sliding_attention")
    return _seen_by(tuple(local), window, context, rope)


def _seen_by(layers: tuple[int, ...], window: int, context: int, rope: Rope) -> LocalLayers | None:
    """Layers with a window, where it is one: where sequences may be longer."""
    if not layers or window >= context:
        return None
    return LocalLayers(layers, window, rope.theta, rope.divisors)


def from_gguf(metadata: Fields, tensors: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """The architecture in GGUF metadata and tensor shapes, without divisors kept as tensors.

    A llama.cpp file keeps Llama 3's rope scaling as a tensor of divisors; its reader adds it.
    """
    family = gguf_family(metadata)
    assert family.gguf is not None
    try:
        base = _llama_from_gguf(metadata, tensors, family)
        start = f"{family.gguf.architecture}."
        own = {key.removeprefix(start): metadata[key] for key in metadata if key.startswith(start)}
        config = family.read(family.gguf.fields(own), base)
    except KeyError as error:
        raise UserError(f"the GGUF metadata has no {error}, which a model needs") from None
    return dataclasses.replace(
        config,
        qk_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        v_bias="blk.0.attn_v.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    )


def gguf_family(metadata: Fields) -> Family:
    """The family that a GGUF file is of."""
    if metadata.get("general.architecture") == "llama" and metadata.get("llama.expert_count"):
        return MIXTRAL
    return _supported(metadata.get("general.architecture"), GGUF_FAMILIES)


def _llama_from_gguf(
    metadata: Fields, tensors: Mapping[str, tuple[int, ...]], family: Family
) -> ModelConfig:
    """What the metadata would be of llama."""
    start = metadata["general.architecture"]
    if "token_embd.weight" not in tensors:
        raise UserError("the GGUF file has no tensor 'token_embd.weight'")

    def number(key: str, default: int | None = None) -> int:
        return count(metadata, f"{start}.{key}", default)

    heads, width, context = (
        number(key) for key in ("attention.head_count", "embedding_length", "context_length")
    )
    head_dim = number("attention.key_length", width // heads)
    rope = read_rope(_gguf_rope(metadata, start, head_dim), head_dim, context)
    window = context if family.window == "own" else number("attention.sliding_window", context)
    layers = number("block_count")
    return ModelConfig(
        family=family.name,
        layers=layers,
        width=width,
        mlp_width=number("feed_forward_length"),
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=tensors["token_embd.weight"][0],
        context=context,
        norm_eps=positive(metadata, f"{start}.attention.layer_norm_rms_epsilon"),
        rope_theta=rope.theta,
        rope_divisors=rope.divisors,
        rope_gain=rope.gain,
        tied="output.weight" not in tensors,
        local=_seen_by(tuple(range(layers)), window, context, rope),
    )


# Our name of a field of a rope scaling -> llama.cpp's
_GGUF_ROPE = {
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


def _gguf_rope(metadata: Fields, start: str, head_dim: int) -> dict:
    """What a GGUF file says of rotary angles, as a config.json would.

    As llama.cpp has it, a factor without a type is linear, and has had another name.
    """
    older = metadata.get(f"{start}.rope.scale_linear")
    factor = metadata.get(f"{start}.rope.scaling.factor", older)
    kind = metadata.get(f"{start}.rope.scaling.type", "linear" if factor else "none")
    rotary = count(metadata, f"{start}.rope.dimension_count", head_dim)
    rope = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": positive(metadata, f"{start}.rope.freq_base", THETA),
        "partial_rotary_factor": rotary / head_dim,
        "factor": factor,
    }
    given = {name: metadata.get(f"{start}.{key}") for name, key in _GGUF_ROPE.items()}
    return {name: value for name, value in (rope | given).items() if value is not None}


def _supported(name: str | None, known: Mapping[str, Family]) -> Family:
    if name is None or name not in known:
        raise UserError(f"architecture '{name}' is not supported; supported: {', '.join(known)}")
    return known[name]
