"""What is measured: a model with a cache, or with a baseline that stands for one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkvq.cache.calibrated import Calibration, methods_for
from jkvq.cache.footprint import bits_per_element
from jkvq.cache.layout import KVCache, empty_cache, fill_table, pages_for, pages_of_window
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.calibration.artefact import load_artefact
from jkvq.engine.forward import forward
from jkvq.evaluation.baselines import BASELINES, ChannelWise
from jkvq.evaluation.reconstruct import (
    LayerReconstruction,
    Reconstruction,
    TokenWise,
    attend_reconstructed,
)
from jkvq.llm import LLM, checked_basis, find_calibration, with_cache
from jkvq.models.decoder import run
from jkvq.models.model import Model
from jkvq.pallas_kernels.formats.packed import LayerIndex
from jkvq.support.errors import UserError

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
        spec = self.llm.spec
        pages = range(1, 1 + pages_for(tokens, spec))
        columns = max(-(-tokens // spec.page), pages_of_window(spec))
        table = jnp.asarray(fill_table(spec, [pages], columns))
        return empty_cache(spec, CacheShape.of(self.llm.config), 1 + len(pages), table)

    def step(self, state: KVCache, tokens, count: int, position: int):
        llm, new = self.llm, (jnp.asarray(tokens), jnp.asarray([count], jnp.int32))
        return forward(
            *(llm.config, llm.params, llm.basis, state, *new),
            phase="forced",
            implementation=llm.implementation,
            first=position,
        )

    def bits_per_element(self, context: int) -> float:
        return bits_per_element(self.llm.spec, CacheShape.of(self.llm.config), context)


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
        L, K, H, *_ = CacheShape.of(self.model.config)
        S = -(-tokens // CHUNK) * CHUNK
        zeros = jnp.zeros((L, S, K, H))
        return _KeptTokens(zeros, jnp.zeros_like(zeros), jnp.int32(0))

    def step(self, state: _KeptTokens, tokens, count: int, position: int):
        config, length = self.model.config, state.length

        def over_kept(layer: int) -> _OverKept:
            how = config.attention_scale, config.layer(layer).window
            return _OverKept(self.kept.layer(layer), layer, length, *how)

        at = position + length + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        hidden, (k, v) = run(
            config, self.model.params, jnp.asarray(tokens), at, over_kept, (state.k, state.v)
        )
        return hidden, _KeptTokens(k, v, length + count)

    def bits_per_element(self, context: int) -> float:
        return self.kept.bits_per_element(CacheShape.of(self.model.config), context)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _OverKept:
    """Attention of one layer over what a baseline gives back of the tokens kept so far."""

    kept: LayerReconstruction
    layer: LayerIndex
    length: Int[Array, ""]
    scale: float = field(metadata={"static": True})
    window: int | None = field(metadata={"static": True})

    def __call__(self, q, new_k, new_v, before, sinks=None):
        q, new_k, new_v = (heads.finished for heads in (q, new_k, new_v))
        k, v = (
            jax.lax.dynamic_update_slice(
                old, new.astype(old.dtype), (self.layer, self.length, 0, 0)
            )
            for old, new in zip(before, (new_k, new_v), strict=True)
        )
        position = self.length + jnp.arange(q.shape[1], dtype=jnp.int32)
        how = {"scale": self.scale, "window": self.window, "sinks": sinks}
        out = attend_reconstructed(self.kept, q[0], k[self.layer], v[self.layer], position, **how)
        return out[None].astype(q.dtype), (k, v)


def subject(
    model: Model,
    cache: str,
    calibration: Calibration | str | Path | None = None,
    *,
    implementation: str | None = None,
) -> Subject:
    """The model with a cache, or a baseline, of this name."""
    if cache in BASELINES:
        _require_keys_and_values(model)
        BASELINES[cache].check(model.config.head_dim)
        return Baseline(model, BASELINES[cache])
    return Cached(with_cache(model, cache, calibration, implementation=implementation))


def _require_keys_and_values(model: Model) -> None:
    if model.config.latent is not None:
        raise UserError(
            "this model keeps latents (MLA): baselines and comparisons of layers read keys and "
            "values; `jkvq eval ppl` takes caches that latents can have"
        )


def reconstruction(
    model: Model, cache: str, calibration: Calibration | str | Path | None = None
) -> Reconstruction:
    """What a cache, or a baseline, of this name gives back."""
    _require_keys_and_values(model)
    if cache in BASELINES:
        BASELINES[cache].check(model.config.head_dim)
        return BASELINES[cache]
    spec = parse_spec(cache)
    found = find_calibration(model.name, spec, calibration, model)
    return TokenWise(spec, checked_basis(model.config, spec, found))


def choose_calibration(folders: Sequence[Path], cache: str) -> Path | None:
    """The first of these artefacts that serves a cache; None is the one kept for the model."""
    if cache in BASELINES:
        return None
    methods = methods_for(parse_spec(cache))
    return next((path for path in folders if load_artefact(path).manifest.method in methods), None)
