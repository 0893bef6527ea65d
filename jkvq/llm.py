"""A model together with the cache it runs with."""

from dataclasses import dataclass, field
from pathlib import Path

from jkvq.attention.implementation import choose_implementation
from jkvq.cache.basis import Basis, make_basis
from jkvq.cache.calibrated import Calibration, calibrate_command, methods_for
from jkvq.cache.fold import fold_values
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec import CacheSpec
from jkvq.cache.specs.spec_text import as_spec, spec_text
from jkvq.calibration.artefact import find_artefact, load_artefact
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params
from jkvq.models.model import Model
from jkvq.models.tokenizer import Tokenizer
from jkvq.pallas_kernels.types import Implementation
from jkvq.support.arguments import INT32, refusal, whole
from jkvq.support.errors import UserError


@dataclass(frozen=True)
class LLM:
    """A model with its cache, ready to run.

    config, params: with the cache's value basis folded in (cache/fold.py), so not as loaded:
        folding may add biases.
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


def checked_pool(tokens: int | None) -> int | None:
    """``pool_tokens`` as it was given, if it is a number of tokens."""
    if tokens is None:
        return None
    return whole("pool_tokens", tokens, 1, INT32, "a whole number, 1 or more")


def with_cache(
    model: Model,
    cache: str | CacheSpec,
    calibration: Calibration | str | Path | None = None,
    *,
    implementation: str | None = None,
    pool_tokens: int | None = None,
) -> LLM:
    """A model with a cache; several may share its weights.

    Args:
        model: from `jkvq.load_model`.
        cache: how keys and values are stored; `jkvq caches` lists the names.
        calibration: what the cache needs to know of the model, or the folder of an artefact that
            `jkvq calibrate` wrote; None takes the one kept for this model.
        implementation: ``pallas`` (GPU kernels) or ``reference``; by default the best here.
        pool_tokens: the most tokens that one call may keep in the cache.
    """
    if not isinstance(model, Model):
        raise UserError(
            f"with_cache takes a model without a cache, not {type(model).__name__}: give what "
            "jkvq.load_model returns"
        )
    pool_tokens = checked_pool(pool_tokens)
    spec = as_spec(cache)
    _require_fit(spec, model.config)  # before it asks for a calibration
    calibration = find_calibration(model.name, spec, calibration, model)
    chosen = choose_implementation(implementation, model.config, spec)
    basis = checked_basis(model.config, spec, calibration)
    require_same_weights(calibration, model)
    config, params, basis = fold_values(model.config, model.params, basis)
    return LLM(model.name, config, params, model.tokenizer, spec, basis, pool_tokens, chosen)


def find_calibration(
    model: str | Path,
    spec: CacheSpec,
    given: Calibration | str | Path | None,
    loaded: Model | None = None,
) -> Calibration | None:
    """What a spec needs: as given, from a folder, or kept for the model; None if it needs none.

    loaded: the model, where it is; what is kept beside for its weights serves it too.
    """
    if given is not None:
        require_use(spec)
        return read_calibration(given)
    if not methods_for(spec):
        return None
    folder = find_artefact(model, spec, None if loaded is None else loaded.fingerprint)
    if folder is None:
        raise missing_calibration(model, spec)
    return load_artefact(folder).calibration


def read_calibration(given: Calibration | str | Path) -> Calibration:
    """A calibration that is given as it is or by its folder."""
    if isinstance(given, Calibration):
        return given
    if not isinstance(given, str | Path):
        what = "the folder of an artefact, or an artefact's calibration"
        raise refusal("calibration", given, f"{what} (`jkvq.load_artefact(folder).calibration`)")
    return load_artefact(given).calibration


def require_use(spec: CacheSpec) -> None:
    """Refuses a calibration for a cache that would not look at it."""
    if not methods_for(spec):
        raise UserError(
            f"{spec_text(spec)} takes no calibration: leave it out, or choose a cache that takes "
            "one, such as jkvq-int4"
        )


def missing_calibration(model: str | Path, spec: CacheSpec) -> UserError:
    """The error that names the command which makes a calibration."""
    return UserError(
        f"this cache needs a calibration of {model}: make one with "
        f"`{calibrate_command(spec, str(model))}`, or pass the folder of one"
    )


def require_same_weights(calibration: Calibration | None, model: Model) -> None:
    """Refuses a calibration that was made for other weights than the model's."""
    if calibration is None or calibration.weights is None:
        return
    found = model.fingerprint
    if found != calibration.weights:
        raise UserError(
            f"the calibration was made for a model with weights {calibration.weights[:12]}, and "
            f"this one has {found[:12]}: calibrate it with `jkvq calibrate`"
        )


def _require_fit(spec: CacheSpec, config: ModelConfig) -> None:
    spec.check(config.layers, config.head_dim, config.context, config.latent_width)


def checked_basis(config: ModelConfig, spec: CacheSpec, calibration: Calibration | None) -> Basis:
    """The basis of a spec for a model; refuses a spec that the model cannot have."""
    _require_fit(spec, config)
    return make_basis(spec, CacheShape.of(config), calibration, *config.rope_frequencies)
