"""From a balanced calibration to one that is learned through the model."""

import dataclasses
import hashlib
import json
from pathlib import Path

from jkvq.cache.calibrated import Calibration
from jkvq.cache.specs.spec import CacheSpec
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.calibration.artefact import Artefact, calibration_digest, load_artefact
from jkvq.calibration.learning.cost import operations, require_time
from jkvq.calibration.learning.learn import Outcome, learn, require_learnable
from jkvq.calibration.learning.text import Text, cut
from jkvq.calibration.solve import CalibrationOptions
from jkvq.evaluation.corpus import leading_tokens
from jkvq.models.model import Model
from jkvq.support.errors import UserError
from jkvq.support.lock import hidden_beside
from jkvq.version import VERSION

METHOD = "jkvq"  # whose rotations can be learned, and serve layers of any width
_PASSES = 4  # of a step: exact, over the cache, the same once more, and back


def balanced_artefact(folder: str | Path) -> Artefact:
    """The artefact in a folder; refuses one without balanced rotations."""
    artefact = load_artefact(folder)
    if artefact.manifest.method != METHOD:
        raise UserError(
            f"{folder} is a calibration of method {artefact.manifest.method}: give one of {METHOD}"
        )
    return artefact


def learned_cache(chosen: CalibrationOptions) -> CacheSpec | None:
    """The cache that is learned for."""
    if chosen.learn_for is None:
        return None
    spec = parse_spec(chosen.learn_for)
    require_learnable(spec)
    return spec


def text_to_learn(
    model: Model, spec: CacheSpec, chosen: CalibrationOptions, tokens: list[int]
) -> Text:
    """The windows of a text; refuses one that is too short, and hours on a CPU."""
    spec.check(model.config.layers, model.config.head_dim, model.config.context)
    text = cut(
        tokens,
        spec,
        window=chosen.window,
        context=chosen.context or model.config.context,
        leading=len(leading_tokens(model.tokenizer)),
        batch=chosen.batch,
        seed=chosen.seed,
    )
    each = _PASSES * chosen.batch * operations(model.config, chosen.window)
    work = f"{chosen.steps} steps of {chosen.batch} windows"
    less = "fewer steps, a smaller batch or a shorter window"
    require_time(work, chosen.steps * each, less)
    return text


def learned(
    model: Model,
    start: Calibration,
    spec: CacheSpec,
    text: Text,
    chosen: CalibrationOptions,
    folder: Path,
) -> Outcome:
    """A calibration learned from a start; how far it is lies beside the folder it is made for."""
    return learn(
        model.config,
        model.params,
        start,
        spec,
        text,
        steps=chosen.steps,
        rate=chosen.rate,
        place=state_file(folder),
        identity=_identity(model, start, text, chosen),
    )


def state_file(folder: Path) -> Path:
    """Where a run that is to fill a folder keeps how far it is; hidden, as locks are."""
    return hidden_beside(folder, "learning")


def _identity(model: Model, start: Calibration, text: Text, chosen: CalibrationOptions) -> str:
    """A name for all that a run depends on."""
    given = dataclasses.asdict(chosen) | {
        "weights": model.fingerprint,
        "dtype": str(model.params["embedding"].dtype),
        "start": calibration_digest(start),
        "version": VERSION,
    }
    digest = hashlib.sha256(json.dumps(given, sort_keys=True).encode())
    for windows in (text.windows, text.held_out):
        digest.update(windows.tobytes())
    return digest.hexdigest()
