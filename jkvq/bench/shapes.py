"""Shapes of known models, and models of random weights in them: speed does not ask for sense."""

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkvq.cache.calibrated import Calibration, SideCalibration, Transform, methods_for
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec import CacheSpec
from jkvq.llm import LLM, with_cache
from jkvq.models.config import Experts, ModelConfig
from jkvq.models.decoder import abstract_params
from jkvq.models.model import Model, require_memory
from jkvq.support.compile_cache import keep_compiled_programs
from jkvq.support.errors import UserError, nearest


def _qwen3(layers: int, width: int, mlp_width: int, heads: int, *, tied: bool = False):
    return ModelConfig(
        family="qwen3",
        layers=layers,
        width=width,
        mlp_width=mlp_width,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        vocab=151936,
        context=131072,
        norm_eps=1e-6,
        rope_theta=1e6,
        rope_divisors=(1.0,) * 64,
        qk_norm=True,
        tied=tied,
    )


SHAPES = {
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64),
    "qwen3-30b-a3b": dataclasses.replace(
        _qwen3(48, 2048, 6144, 32),
        family="qwen3_moe",
        kv_heads=4,
        experts=Experts(number=128, chosen=8, width=768),
    ),
}


class RandomWords:
    """A tokenizer for random weights: so many letters are a token, every token is a word."""

    stop_tokens, can_chat = frozenset(), False
    LETTERS = 4  # of a token of a prompt

    def __init__(self, vocab: int):
        self._vocab = vocab

    def encode(self, text: str) -> list[int]:
        pieces = (text[at : at + self.LETTERS] for at in range(0, len(text), self.LETTERS))
        return [zlib.crc32(piece.encode()) % self._vocab for piece in pieces]

    def decode(self, tokens: list[int]) -> str:
        return "".join(f" {token}" for token in tokens)


def shape_config(name: str) -> ModelConfig:
    """The shape of that name."""
    if name not in SHAPES:
        raise UserError(f"shape '{name}' is not known: {nearest(name, SHAPES)}")
    return SHAPES[name]


def random_model(config: ModelConfig, dtype=jnp.bfloat16) -> Model:
    """Weights of the size that a trained model's have, and tokens that are some text."""
    require_memory(config, dtype)
    keep_compiled_programs()
    leaves, tree = jax.tree.flatten(abstract_params(config, dtype))
    keys = jax.random.split(jax.random.key(0), len(leaves))

    @functools.partial(jax.jit, static_argnums=1)
    def draw(key, shape):
        return jax.random.normal(key, shape, dtype) * (0.02 if len(shape) > 1 else 1.0)

    params = [draw(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    words: Any = RandomWords(config.vocab)
    return Model("random", config, tree.unflatten(params), words)


def with_any_cache(model: Model, spec: CacheSpec, implementation: str | None = None) -> LLM:
    """A model with a cache, calibrated by numbers of the right shapes."""
    shape = CacheShape.of(model.config)
    calibration = made_up(shape, spec.key.bits) if methods_for(spec) else None
    return with_cache(model, spec, calibration, implementation=implementation)


def made_up(shape: CacheShape, bits: int) -> Calibration:
    """A calibration that was never measured."""
    rng = np.random.default_rng(0)
    L, K, H, *_ = shape
    widths = np.resize([bits + 2, bits + 1, bits, bits, bits, bits - 1, bits - 1, bits - 1], H // 2)

    def side() -> SideCalibration:
        transform = Transform(
            mean=rng.normal(size=(L, K, H)).astype(np.float32),
            rotation=np.linalg.qr(rng.normal(size=(L, K, H, H)))[0].astype(np.float32),
            spread=np.ones((L, K, H), np.float32),
        )
        return SideCalibration(transform, widths=np.broadcast_to(widths, (8, L, K, H // 2)))

    return Calibration(side(), side())
