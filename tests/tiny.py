"""A small random model with a byte tokenizer, for tests of everything around a model."""

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jkvq.basis import make_basis
from jkvq.llm import LLM, with_cache
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import abstract_params
from jkvq.models.tokenizer import Tokenizer
from jkvq.spec import PRESETS, parse_spec

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


# Presets that heads of 16 channels can have and that need no calibration.
SERVED = [
    name
    for name, preset in PRESETS.items()
    if not (preset.spec.key.calibrated or preset.spec.value.calibrated)
    and (not name.startswith("bdr") or name.startswith("bdr16"))
]


def tiny_llm(cache: str = "f32,page=8", seed: int = 0, config: ModelConfig = CONFIG) -> LLM:
    abstract = abstract_params(config, jnp.float32)
    leaves, structure = jax.tree.flatten(abstract)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    params = structure.unflatten(
        jax.random.normal(key, leaf.shape) * (leaf.shape[-1] ** -0.5 if leaf.ndim > 1 else 1.0)
        for key, leaf in zip(keys, leaves, strict=True)
    )
    spec = parse_spec("f32,page=8")
    basis = make_basis(spec, config.cache_shape, None)
    plain = LLM("tiny", config, params, byte_tokenizer(), spec, basis)
    return with_cache(plain, cache)


def byte_tokenizer() -> Tokenizer:
    """Token i is the byte of rank i in the byte-level alphabet; token 256 ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    return Tokenizer(hf, frozenset({EOS}))
