"""A model together with the cache it runs with."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp

from jkvq.attention.implementation import choose_implementation
from jkvq.cache.basis import Basis, make_basis
from jkvq.cache.calibrated import Calibration, calibrate_command, methods_for
from jkvq.cache.fold import fold_values
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec import CacheSpec
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.calibration.artefact import find_artefact, load_artefact
from jkvq.defaults import PLAIN_CACHE
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params, weight_bytes
from jkvq.models.fingerprint import fingerprint
from jkvq.models.formats.checkpoint import Checkpoint, open_checkpoint
from jkvq.models.tokenizer import Tokenizer
from jkvq.pallas_kernels.types import Implementation
from jkvq.support.errors import UserError, nearest
from jkvq.support.memory import format_bytes, free_bytes

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True)
class LLM:
    """A model ready to run.

    config, params: of the model with the cache's value basis folded into it.
    pool_tokens: the most tokens that one call may keep in the cache; None leaves it to the free
        memory.
    """

    name: str
    config: ModelConfig
    params: Params = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)
    spec: CacheSpec
    basis: Basis = field(repr=False)
    pool_tokens: int | None = None
    implementation: Implementation = "reference"


def load_plain(model: str | Path, *, dtype: str | None = None) -> LLM:
    """Loads a model as it is, with the 16-bit cache: what calibration and evaluation start from."""
    return read_weights(str(model), open_checkpoint(model), compute_dtype(dtype))


def read_weights(name: str, checkpoint: Checkpoint, dtype) -> LLM:
    """The model of an open checkpoint, with the 16-bit cache."""
    _require_memory(checkpoint, dtype)
    config, spec = checkpoint.config, parse_spec(PLAIN_CACHE)
    basis = checked_basis(config, spec, None)
    tokenizer, params = checkpoint.tokenizer(), checkpoint.params(dtype)
    chosen = choose_implementation(None, config, spec)
    return LLM(name, config, params, tokenizer, spec, basis, implementation=chosen)


def with_cache(
    llm: LLM,
    cache: str | CacheSpec,
    calibration: Calibration | str | Path | None = None,
    *,
    implementation: str | None = None,
) -> LLM:
    """The same model with another cache; ``llm`` must have one that folds nothing, as ``bf16``."""
    spec = parse_spec(cache) if isinstance(cache, str) else cache
    require_unfolded(llm)
    calibration = find_calibration(llm.name, spec, calibration)
    basis = checked_basis(llm.config, spec, calibration)
    chosen = choose_implementation(implementation, llm.config, spec)
    _require_same_weights(calibration, llm.params)
    config, params, basis = fold_values(llm.config, llm.params, basis)
    return dataclasses.replace(
        llm, config=config, params=params, spec=spec, basis=basis, implementation=chosen
    )


def require_unfolded(llm: LLM) -> None:
    """Refuses a model that is not as it was loaded, but folded for its cache."""
    if llm.spec.value.rotation != "none" or llm.spec.value.center:
        raise UserError("this model's weights are folded for its cache: load it with cache='bf16'")


def find_calibration(
    model: str | Path, spec: CacheSpec, given: Calibration | str | Path | None
) -> Calibration | None:
    """What a spec needs: as given, from a folder, or kept for the model; None if it needs none."""
    if isinstance(given, Calibration) or not methods_for(spec):
        return given if isinstance(given, Calibration) else None
    folder = find_artefact(model, spec) if given is None else given
    if folder is None:
        raise missing_calibration(model, spec)
    return load_artefact(folder).calibration


def missing_calibration(model: str | Path, spec: CacheSpec) -> UserError:
    """The error that names the command which makes a calibration."""
    return UserError(
        f"this cache needs a calibration of {model}: make one with "
        f"`{calibrate_command(spec, str(model))}`, or pass the folder of one"
    )


def _require_same_weights(calibration: Calibration | None, params: Params) -> None:
    if calibration is None or calibration.weights is None:
        return
    found = fingerprint(params)
    if found != calibration.weights:
        raise UserError(
            f"the calibration was made for a model with weights {calibration.weights[:12]}, and "
            f"this one has {found[:12]}: calibrate it with `jkvq calibrate`"
        )


def checked_basis(config: ModelConfig, spec: CacheSpec, calibration: Calibration | None) -> Basis:
    """The basis of a spec for a model; refuses a spec that the model cannot have."""
    spec.check(config.layers, config.head_dim, config.context)
    return make_basis(spec, CacheShape.of(config), calibration, config.rope_frequency)


def compute_dtype(name: str | None):
    """The dtype called ``name``, or the one this device computes fastest in."""
    if name is None:  # CPUs emulate bfloat16
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    if name not in _DTYPES:
        raise UserError(f"dtype '{name}' is not known: {nearest(name, _DTYPES)}")
    return _DTYPES[name]


def _require_memory(checkpoint: Checkpoint, dtype) -> None:
    needed, free = weight_bytes(checkpoint.config, dtype), free_bytes()
    if free is not None and needed > free:
        advice = "; try dtype='bfloat16'" if dtype == jnp.float32 else ""
        raise UserError(
            f"the weights take {format_bytes(needed)} and {format_bytes(free)} are free{advice}"
        )
