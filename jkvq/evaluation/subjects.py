"""What is measured: a model with a cache, or with a baseline that stands for one."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkvq.cache.basis import Basis
from jkvq.cache.calibrated import Calibration, methods_for
from jkvq.cache.footprint import bits_per_element
from jkvq.cache.layout import KVCache, empty_cache, pages_for
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.calibration.artefact import load_artefact
from jkvq.engine.forward import forward
from jkvq.evaluation.baselines import BASELINES, ChannelWise
from jkvq.evaluation.reconstruct import Reconstruction, TokenWise, attend_reconstructed
from jkvq.llm import LLM, checked_basis, find_calibration, with_cache
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params, run
from jkvq.models.model import Model
from jkvq.pallas_kernels.types import Implementation

CHUNK = 256  # tokens per step


class Subject(Protocol):
    """A model with a cache, run over one sequence; every token reads the others as decode would."""

    @property
    def model(self) -> Model | LLM:
        """What runs: its config and params."""
        ...

    def start(self, tokens: int) -> Any:
        """The state before the first of at most so many tokens."""
        ...

    def step(
        self, state: Any, tokens: Int[np.ndarray, "1 T"], count: int, position: int
    ) -> tuple[Float[Array, "1 T D"], Any]:
        """Final hidden states of the next tokens, the first ``count`` real, and the new state.

        ``position`` is that of the sequence's first token.
        """
        ...

    def bits_per_element(self, context: int) -> float: ...


@dataclass(frozen=True)
class Cached:
    """A model running over its cache."""

    llm: LLM

    @property
    def model(self) -> LLM:
        return self.llm

    def start(self, tokens: int) -> KVCache:
        pages = max(1, pages_for(tokens, self.llm.spec))
        table = jnp.arange(1, pages + 1, dtype=jnp.int32)[None]
        return empty_cache(self.llm.spec, CacheShape.of(self.llm.config), pages + 1, table)

    def step(self, state: KVCache, tokens, count: int, position: int):
        llm, counts = self.llm, jnp.asarray([count], jnp.int32)
        return _cached_step(
            *(llm.config, llm.params, llm.basis, state, tokens, counts, jnp.int32(position)),
            implementation=llm.implementation,
        )

    def bits_per_element(self, context: int) -> float:
        return bits_per_element(self.llm.spec, CacheShape.of(self.llm.config), context)


@functools.partial(jax.jit, static_argnames=("config", "implementation"), donate_argnames="cache")
def _cached_step(
    config: ModelConfig,
    params: Params,
    basis: Basis,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    first: Int[Array, ""],
    *,
    implementation: Implementation,
) -> tuple[Float[Array, "B T D"], KVCache]:
    step = config, params, basis, cache, tokens, count
    return forward(*step, phase="forced", implementation=implementation, first=first)


class _KeptTokens(NamedTuple):
    """Keys and values of all layers, and how many tokens they are of."""

    k: Float[Array, "L S K H"]
    v: Float[Array, "L S K H"]
    length: Int[Array, ""]


@dataclass(frozen=True)
class Baseline:
    """A model running over what a baseline gives back."""

    model: Model
    kept: ChannelWise

    def start(self, tokens: int) -> _KeptTokens:
        L, K, H = CacheShape.of(self.model.config)
        S = -(-tokens // CHUNK) * CHUNK
        zeros = jnp.zeros((L, S, K, H))
        return _KeptTokens(zeros, jnp.zeros_like(zeros), jnp.int32(0))

    def step(self, state: _KeptTokens, tokens, count: int, position: int):
        hidden, k, v = _reconstructed_step(
            self.model.config, self.model.params, self.kept, *state, tokens, jnp.int32(position)
        )
        return hidden, _KeptTokens(k, v, state.length + count)

    def bits_per_element(self, context: int) -> float:
        return self.kept.bits_per_element(CacheShape.of(self.model.config), context)


@functools.partial(jax.jit, static_argnames="config", donate_argnames=("k", "v"))
def _reconstructed_step(
    config: ModelConfig,
    params: Params,
    kept: ChannelWise,
    k: Float[Array, "L S K H"],
    v: Float[Array, "L S K H"],
    length: Int[Array, ""],
    tokens: Int[Array, "1 T"],
    first: Int[Array, ""],
):
    position = length + jnp.arange(tokens.shape[1], dtype=jnp.int32)

    def attend(layer: int, q, new_k, new_v, before):
        k, v = (
            jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (layer, length, 0, 0))
            for old, new in zip(before, (new_k, new_v), strict=True)
        )
        out = attend_reconstructed(
            kept.layer(layer), q[0], k[layer], v[layer], position, scale=config.attention_scale
        )
        return out[None].astype(q.dtype), (k, v)

    hidden, (k, v) = run(config, params, tokens, first + position[None], attend, (k, v))
    return hidden, k, v


def subject(
    model: Model,
    cache: str,
    calibration: Calibration | str | Path | None = None,
    *,
    implementation: str | None = None,
) -> Subject:
    """The model with a cache, or a baseline, of this name."""
    if cache in BASELINES:
        BASELINES[cache].check(model.config.head_dim)
        return Baseline(model, BASELINES[cache])
    return Cached(with_cache(model, cache, calibration, implementation=implementation))


def reconstruction(
    model: Model, cache: str, calibration: Calibration | str | Path | None = None
) -> Reconstruction:
    """What a cache, or a baseline, of this name gives back."""
    if cache in BASELINES:
        BASELINES[cache].check(model.config.head_dim)
        return BASELINES[cache]
    spec = parse_spec(cache)
    found = find_calibration(model.name, spec, calibration)
    return TokenWise(spec, checked_basis(model.config, spec, found))


def choose_calibration(folders: Sequence[Path], cache: str) -> Path | None:
    """The first of these artefacts that serves a cache; None is the one kept for the model."""
    if cache in BASELINES:
        return None
    methods = methods_for(parse_spec(cache))
    return next((path for path in folders if load_artefact(path).manifest.method in methods), None)
