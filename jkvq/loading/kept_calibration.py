"""The calibration of a model's weights: as it is kept, or made now."""

from pathlib import Path
from typing import NamedTuple

from jkvq.cache.calibrated import methods_for
from jkvq.cache.specs.spec import CacheSpec
from jkvq.cache.specs.spec_text import spec_text
from jkvq.calibration.artefact import (
    Artefact,
    default_folder,
    find_artefact,
    folder_beside,
    load_artefact,
)
from jkvq.loading.calibrate import calibrate_on_first_use, calibrates_on_first_use
from jkvq.models.model import Model
from jkvq.support.errors import UserError

FIRST_USE_TOKENS = 2048  # seconds instead of a minute; docs/calibration.md has what it costs


class KeptCalibration(NamedTuple):
    """What is kept for a model's weights, or why there is nothing.

    folder: where another is kept: in the place of what is damaged or of an older format, but
        beside what is of other weights. Those of float16 are others than those of float32.
    """

    artefact: Artefact | None
    folder: Path
    reason: str


def artefact_for(model: Model, spec: CacheSpec, tokens: int = FIRST_USE_TOKENS) -> Artefact:
    """What a calibrated cache needs: as kept for a model's weights, or made of so many tokens."""
    artefact, folder, reason = kept_calibration(model, spec)
    return artefact or calibrate_on_first_use(model, spec, folder, tokens, reason)


def kept_calibration(model: Model, spec: CacheSpec) -> KeptCalibration:
    """What is kept for a model's weights that serves a calibrated cache.

    What is damaged or of an older format counts as absent, if it can be made on first use.
    """
    usual = default_folder(model.name, methods_for(spec)[0])
    beside = folder_beside(usual, model.fingerprint)
    place = find_artefact(model.name, spec, model.fingerprint)
    folder = beside if place == beside else usual
    if place is None:
        return KeptCalibration(None, folder, f"First use of {spec_text(spec)} with {model.name}")
    try:
        found = load_artefact(place)
    except UserError as error:
        if not calibrates_on_first_use(spec):
            raise
        return KeptCalibration(None, folder, str(error).rpartition(";")[0])
    if found.manifest.weights == model.fingerprint:
        return KeptCalibration(found, folder, "")
    reason = f"{model.name} has other weights than when it was calibrated"
    return KeptCalibration(None, beside, reason)
