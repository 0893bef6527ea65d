"""Small random models with a byte tokenizer, for tests of everything around a model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jkvq.cache.specs.presets import PRESETS
from jkvq.llm import LLM, with_cache
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params
from jkvq.models.joined import abstract_checkpoint
from jkvq.models.model import Model
from jkvq.models.tokenizer import Tokenizer

EOS = 256
CONFIG = ModelConfig(
    family="qwen3",
    layers=2,
    width=32,
    mlp_width=48,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=257,
    context=1024,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_divisors=(1.0,) * 8,
    qk_norm=True,
)


# Low rotary frequencies, where key biases lie: they hardly turn, and stay constant over tokens.
BIASED = dataclasses.replace(
    CONFIG, family="qwen2", qk_norm=False, qk_bias=True, v_bias=True, rope_theta=1e8
)

# Presets that heads of 16 channels can have and that need no calibration.
SERVED = [
    name
    for name, preset in PRESETS.items()
    if not (preset.spec.key.calibrated or preset.spec.value.calibrated)
    and (not name.startswith("bdr") or name.startswith("bdr16"))
]


def tiny_llm(cache: str = "f32,page=8", seed: int = 0, config: ModelConfig = CONFIG) -> LLM:
    return with_cache(tiny_model(seed, config), cache)


def tiny_model(seed: int = 0, config: ModelConfig = CONFIG) -> Model:
    return Model("tiny", config, _random_params(config, seed), byte_tokenizer())


def model_of(llm: LLM) -> Model:
    """The model of one whose cache folds nothing, as f32."""
    return Model(llm.name, llm.config, llm.params, llm.tokenizer)


def biased_model(bias: float, sharpness: float = 1.0, config: ModelConfig = BIASED) -> Model:
    """A model as Qwen2.5, whose keys have a constant in the two channels of the slowest pair.

    sharpness: what its scores are multiplied by; random ones are nearly all alike.
    """
    params = _random_params(config, seed=3)
    H = config.head_dim
    constant = np.zeros((config.kv_heads, H), np.float32)
    constant[:, [H // 2 - 1, H - 1]] = bias
    for layer in params["layers"].values():
        qkv, queries = layer["attention"]["qkv"], config.heads * H
        keys = slice(queries, queries + constant.size)
        qkv["bias"] = qkv["bias"].at[keys].add(constant.reshape(-1))
    params["norm"] = jax.tree.map(lambda weight: weight * sharpness, params["norm"])
    return Model("tiny", config, params, byte_tokenizer())


def _random_params(config: ModelConfig, seed: int) -> Params:
    leaves, structure = jax.tree.flatten(abstract_checkpoint(config, jnp.float32))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    params = structure.unflatten(
        jax.random.normal(key, leaf.shape) * (leaf.shape[-1] ** -0.5 if leaf.ndim > 1 else 1.0)
        for key, leaf in zip(keys, leaves, strict=True)
    )
    layers = {number: joined_layer(layer) for number, layer in params["layers"].items()}
    return {**params, "layers": layers}


def joined_layer(layer: Params) -> Params:
    """A layer of a checkpoint as the decoder takes it, written out."""

    def join(module: Params, *names: str) -> Params:
        kinds = {kind for name in names for kind in module[name]}
        rows = {name: len(module[name]["weight"]) for name in names}
        return {
            kind: jnp.concatenate([module[name].get(kind, jnp.zeros(rows[name])) for name in names])
            for kind in kinds
        }

    attention, mlp = layer["attention"], layer["mlp"]
    if "k" in attention:  # latents are not joined
        rest = {name: own for name, own in attention.items() if name not in ("q", "k", "v")}
        attention = {**rest, "qkv": join(attention, "q", "k", "v")}
    return {
        **layer,
        "attention": attention,
        "mlp": {"gate_up": join(mlp, "gate", "up"), "down": mlp["down"]},
    }


def byte_tokenizer() -> Tokenizer:
    """Token i is the byte of rank i in the byte-level alphabet; token 256 ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    return Tokenizer(hf, frozenset({EOS}))
