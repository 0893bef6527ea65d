"""Loading a model with a cache that is safe: fit for it, calibrated for it, and checked."""

import warnings
from pathlib import Path

from jkvq.attention.implementation import choose_implementation, require_known
from jkvq.cache.calibrated import Calibration, methods_for
from jkvq.cache.specs.spec import CacheSpec
from jkvq.cache.specs.spec_text import as_spec, parse_spec, spec_text
from jkvq.calibration.artefact import find_artefact
from jkvq.defaults import DEFAULT_CACHES, DEFAULT_MODEL, PLAIN_CACHE
from jkvq.llm import (
    LLM,
    checked_basis,
    checked_pool,
    find_calibration,
    missing_calibration,
    read_calibration,
    require_use,
    with_cache,
)
from jkvq.loading.calibrate import calibrates_on_first_use
from jkvq.loading.kept_calibration import artefact_for
from jkvq.loading.self_check import check_cache
from jkvq.models.config import ModelConfig
from jkvq.models.dtype import DTypeLike, compute_dtype
from jkvq.models.formats.checkpoint import open_checkpoint
from jkvq.models.model import Model, read_model
from jkvq.support.arguments import flag
from jkvq.support.errors import CacheWarning, UserError
from jkvq.support.progress import spinner
from jkvq.support.user_cache import sweep_drafts


def load(
    model: str | Path = DEFAULT_MODEL,
    *,
    cache: str | CacheSpec | None = None,
    calibration: Calibration | str | Path | None = None,
    dtype: DTypeLike | None = None,
    pool_tokens: int | None = None,
    implementation: str | None = None,
    check: bool = True,
) -> LLM:
    """Loads a model.

    Args:
        model: a short name (``smollm2-135m``), a folder, a ``.gguf`` file or a hub id.
        cache: how keys and values are stored; `jkvq caches` lists the names. None is ``jkvq-int4``
            where the model can have it.
        calibration: what the cache needs to know of the model, or the folder of an artefact that
            `jkvq calibrate` wrote; None takes the one kept for this model, and makes it on first
            use.
        dtype: ``float32``, ``bfloat16`` or ``float16``, as a name or JAX's own; by default what
            the device computes fastest in.
        pool_tokens: the most tokens that one call may keep in the cache.
        implementation: ``pallas`` (GPU kernels) or ``reference``; by default the best here.
        check: on first use, measure what the cache does to the model, and warn if it breaks it.
    """
    return load_both(
        model,
        cache=cache,
        calibration=calibration,
        dtype=dtype,
        pool_tokens=pool_tokens,
        implementation=implementation,
        check=check,
    )[1]


def load_both(
    model: str | Path,
    *,
    cache: str | CacheSpec | None,
    calibration: Calibration | str | Path | None,
    dtype: DTypeLike | None,
    pool_tokens: int | None,
    implementation: str | None,
    check: bool,
) -> tuple[Model, LLM]:
    """A model without a cache, and with one; see `load`."""
    spec = None if cache is None else as_spec(cache)
    pool_tokens = checked_pool(pool_tokens)
    require_known(implementation)
    flag("check", check)
    if calibration is not None:
        if spec is not None:
            require_use(spec)
        calibration = read_calibration(calibration)
    sweep_drafts()
    compute, checkpoint = compute_dtype(dtype), open_checkpoint(model)
    if spec is None:
        spec, reason = default_cache(checkpoint.config)
        if reason is not None:
            _warn(f"the cache is {spec_text(spec)}, not {DEFAULT_CACHES[0]}: {reason}")
    given = None if calibration is None else find_calibration(model, spec, calibration)
    _refuse_early(checkpoint.config, str(model), spec, given, implementation)
    how = {"implementation": implementation, "pool_tokens": pool_tokens}
    with spinner(f"Preparing {model}"):
        plain = read_model(str(model), checkpoint, compute)
        known = calibration_for(plain, spec, given)
        llm = with_cache(plain, spec, known, **how)
        found = check_cache(plain, llm, known) if check else None
    if found is None or not found.broken:
        return plain, llm
    broken = f"{found.cache} breaks this model: KL {found.kl:.2g}"
    if cache is None:
        _warn(f"{broken}; the cache is {PLAIN_CACHE} instead")
        return plain, with_cache(plain, PLAIN_CACHE, **how)
    _warn(f"{broken}; {_alternative(plain, spec)}")
    return plain, llm


def default_cache(config: ModelConfig) -> tuple[CacheSpec, str | None]:
    """The cache of a model for which nobody names one, and why it is not the usual one."""
    reason = None
    for name in DEFAULT_CACHES:
        spec = parse_spec(name)
        try:
            spec.check(config.layers, config.head_dim, config.context, config.latent_width)
            return spec, reason
        except UserError as error:
            reason = reason or str(error).partition(";")[0]
    raise AssertionError(f"no model is without {PLAIN_CACHE}")


def _refuse_early(
    config: ModelConfig,
    model: str,
    spec: CacheSpec,
    given: Calibration | None,
    implementation: str | None,
) -> None:
    """Refuses what can be refused before the weights are read."""
    choose_implementation(implementation, config, spec)
    if given is not None or not methods_for(spec):
        checked_basis(config, spec, given)
        return
    spec.check(config.layers, config.head_dim, config.context, config.latent_width)
    if find_artefact(model, spec) is None and not calibrates_on_first_use(spec):
        raise missing_calibration(model, spec)


def calibration_for(plain: Model, spec: CacheSpec, given: Calibration | None) -> Calibration | None:
    """What a cache needs: as given, as kept for these weights, or made now."""
    if given is not None or not methods_for(spec):
        return given
    return artefact_for(plain, spec).calibration


def _alternative(plain: Model, broken: CacheSpec) -> str:
    """A cache that works with this model, with its KL as it is measured."""
    spec, _ = default_cache(plain.config)
    if spec != broken:
        calibration = calibration_for(plain, spec, None)
        found = check_cache(plain, with_cache(plain, spec, calibration), calibration)
        if found is not None and not found.broken:
            return f"{found.cache} has {found.kl:.2g}"
    return f"{PLAIN_CACHE} has 0"


def _warn(sentence: str) -> None:
    warnings.warn(sentence, CacheWarning, stacklevel=4)  # where `load` is called
