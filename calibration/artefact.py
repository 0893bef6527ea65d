"""Artefacts: a calibration in a folder, as arrays and a manifest that people can read.

    manifest.json       model and fingerprint of its weights, method, options, 16-bit windows,
                        corpus, tokens, versions, sha256 of the arrays' file
    arrays.safetensors  key/..., value/...: the parts of `SideCalibration`; seen/...: what
                        `jkvq inspect` draws

An artefact is written beside its place and renamed: under its name it is whole or not there.
"""

import dataclasses
import datetime
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jkvq.cache.calibrated import Calibration, SideCalibration, Transform, methods_for
from jkvq.cache.specs.spec import CacheSpec
from jkvq.calibration.solve import Solution, Spectra
from jkvq.models.formats.catalog import CATALOG
from jkvq.support.atomic import drafted, is_vacant, reading, require_vacant
from jkvq.support.errors import UserError
from jkvq.support.user_cache import cache_folder

MANIFEST, ARRAYS = "manifest.json", "arrays.safetensors"
_FORMAT = 7
_SHIPPED = Path(__file__).parent / "shipped"  # of models in the catalogue, for their first use


@dataclass(frozen=True)
class Manifest:
    """Where an artefact comes from.

    layers, kv_heads, head_dim: of the model.
    method: with the number of centroids for k-means.
    options: of the method, as far as they are not the default.
    windows: sink, recent and page of the caches that `SideCalibration.past_windows` was made for.
    corpus, corpus_sha256: the text's name and hash.
    learned: where it was learned, the KL on what was held out of the text: of the start and of the
        step that was kept.
    caches: those that were tuned with it, by name.
    """

    model: str
    weights: str
    layers: int
    kv_heads: int
    head_dim: int
    method: str
    options: dict[str, Any]
    windows: dict[str, int]
    corpus: str
    corpus_sha256: str
    tokens: int
    versions: dict[str, str]
    learned: dict[str, float] = field(default_factory=dict)
    caches: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Artefact:
    """A calibration, where it comes from, and what there is to see of it."""

    calibration: Calibration
    manifest: Manifest
    key: Spectra
    value: Spectra


def make_artefact(solution: Solution, manifest: Manifest) -> Artefact:
    """The artefact of a solution."""
    calibration = dataclasses.replace(solution.calibration, weights=manifest.weights)
    return Artefact(calibration, manifest, solution.key, solution.value)


def calibration_digest(calibration: Calibration) -> str:
    """sha256 of a calibration's arrays."""
    sides = {"key": _present(calibration.key), "value": _present(calibration.value)}
    return _digest(_without_empty(sides))


def default_folder(model: str | Path, method: str) -> Path:
    """Where the calibration of a model by a method is kept, unless the user names a folder."""
    name = str(model).lower()
    if name not in CATALOG:
        path = Path(model).expanduser()
        place = str(path.resolve()) if path.exists() else str(model)
        name = re.sub(r"[^\w.-]+", "-", place.strip("/"))[-60:].strip("-.")
        name = f"{name}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"
    return cache_folder() / "calibrations" / name / method


def folder_beside(folder: Path, weights: str) -> Path:
    """Where the calibration of these weights is kept if ``folder`` has that of others."""
    return folder.with_name(f"{folder.name}-{weights[:12]}")


def find_artefact(model: str | Path, spec: CacheSpec, weights: str | None = None) -> Path | None:
    """The folder of the calibration that serves a spec best; None if there is none.

    One that is kept for the model comes before one that ships with this package. Where that is not
    of these ``weights``, one that is kept beside for them does. Whether it is whole, of this
    version's format and of the model's weights shows when it is read.
    """
    usual = _usual_artefact(model, spec)
    if weights is None or (usual is not None and _weights(usual) == weights):
        return usual
    own = folder_beside(default_folder(model, methods_for(spec)[0]), weights)
    with reading(own):
        return usual if is_vacant(own) else own


def _usual_artefact(model: str | Path, spec: CacheSpec) -> Path | None:
    for method in methods_for(spec):
        folder, shipped = default_folder(model, method), _SHIPPED / str(model).lower() / method
        with reading(folder):
            if not is_vacant(folder):
                return folder
        if str(model).lower() in CATALOG and shipped.is_dir():
            return shipped
    return None


def _weights(folder: Path) -> str | None:
    """The weights that an artefact was made for; None if it is not whole."""
    try:
        with reading(folder):
            return read_manifest(folder).weights
    except UserError:
        return None


def save_artefact(artefact: Artefact, folder: Path, *, replace: bool = False) -> None:
    """Writes an artefact whole or not at all.

    Args:
        artefact: what to write.
        folder: a new or empty one, unless ``replace``.
        replace: take the place of what is there.
    """
    if not replace:
        require_vacant(folder)
    arrays = _arrays(artefact)
    needs = sum(x.nbytes for x in jax.tree.leaves(arrays))
    with drafted(folder, replace=replace, needs=needs) as draft:
        _write(draft / ARRAYS, arrays)
        written = {
            "format": _FORMAT,
            **dataclasses.asdict(artefact.manifest),
            "sha256": _digest_of_file(draft / ARRAYS),
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        (draft / MANIFEST).write_text(json.dumps(written, indent=2) + "\n")


def load_artefact(folder: str | Path) -> Artefact:
    """Reads an artefact; refuses one that is not whole."""
    folder = Path(folder).expanduser()
    with reading(folder):
        return _load(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an artefact; refuses one that is not whole."""
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"{folder} holds no calibration (it has no {MANIFEST}); make one with `jkvq calibrate`"
        )
    try:
        written = json.loads((folder / MANIFEST).read_text())
        if written["format"] != _FORMAT:
            raise UserError(
                f"{folder} is a calibration of format {written['format']}, and this version reads "
                f"{_FORMAT}; calibrate again"
            )
        fields = [field.name for field in dataclasses.fields(Manifest)]
        manifest = Manifest(**{name: written[name] for name in fields if name in written})
        digest = written["sha256"]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / MANIFEST} is damaged ({error}); calibrate again") from None
    if _digest_of_file(folder / ARRAYS) != digest:
        raise UserError(
            f"{folder} is damaged (its arrays are not those it was made with); calibrate again"
        )
    return manifest


def _load(folder: Path) -> Artefact:
    manifest, arrays = read_manifest(folder), _read(folder / ARRAYS)
    key, value, seen = (arrays.get(name, {}) for name in ("key", "value", "seen"))
    calibration = Calibration(_side(key), _side(value), manifest.method, manifest.weights)
    return Artefact(
        calibration,
        manifest,
        *(Spectra(**seen.get(name, {})) for name in ("key", "value")),
    )


Arrays = dict[str, Any]


def _arrays(artefact: Artefact) -> Arrays:
    """The arrays that there are, as nested dicts."""
    calibration = artefact.calibration
    parts = {
        "key": _present(calibration.key),
        "value": _present(calibration.value),
        "seen": {"key": _present(artefact.key), "value": _present(artefact.value)},
    }
    return _without_empty(parts)


def _present(part) -> Arrays:
    """The arrays of a dataclass, and of those in it, that are not None."""
    return {
        name: _present(x) if dataclasses.is_dataclass(x) else x
        for name, x in vars(part).items()
        if x is not None
    }


def _side(arrays: Arrays) -> SideCalibration:
    """The side whose arrays are present."""
    transforms = {
        name: Transform(**arrays.get(name, {})) for name in ("all_tokens", "past_windows")
    }
    return SideCalibration(**arrays | transforms)


def _without_empty(tree: Arrays) -> Arrays:
    filled = {k: _without_empty(v) if isinstance(v, dict) else v for k, v in tree.items()}
    return {k: v for k, v in filled.items() if not isinstance(v, dict) or v}


def _digest(arrays: Arrays, name: str = "") -> str:
    digest = hashlib.sha256()
    for key in sorted(arrays):
        value, path = arrays[key], f"{name}/{key}"
        if isinstance(value, dict):
            digest.update(_digest(value, path).encode())
        else:
            digest.update(f"{path} {value.dtype} {value.shape}\n".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def _digest_of_file(path: Path) -> str | None:
    """sha256 of a file; None if there is none."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _write(path: Path, arrays: Arrays) -> None:
    from safetensors.numpy import save_file  # noqa: PLC0415 (others need it not)

    leaves, _ = jax.tree.flatten_with_path(arrays)
    flat = {"/".join(key.key for key in path): np.ascontiguousarray(x) for path, x in leaves}
    try:
        save_file(flat, path)
    except Exception as error:  # of the library's own kind: a full disk, say
        raise OSError(str(error)) from None
    path.chmod(0o644)  # the library's are private


def _read(path: Path) -> Arrays:
    """The arrays; what is stored in 16 bits comes in 32."""
    from safetensors.numpy import load_file  # noqa: PLC0415

    nested: Arrays = {}
    for name, array in load_file(path).items():
        *folders, last = name.split("/")
        inner = nested
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = array.astype(np.float32) if array.dtype == np.float16 else array
    return nested
