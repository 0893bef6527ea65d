"""Files and folders that are written whole or not at all."""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jkvq.support.errors import UserError
from jkvq.support.lock import lock_beside
from jkvq.support.memory import format_bytes

_live: list[Path] = []


def live_drafts() -> list[Path]:
    """The folders that this process is filling now: should it be ended, they are to go with it."""
    return list(_live)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[IO[str]]:
    """A text file that takes the place of ``path`` if the body succeeds."""
    draft: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        with open(handle, "w", encoding="utf-8", newline="\n") as file:
            yield file
        os.chmod(draft, 0o644)  # mkstemp's are private
        os.replace(draft, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        if draft is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)


@contextlib.contextmanager
def drafted(folder: Path, *, replace: bool = False, needs: int = 0) -> Iterator[Path]:
    """A context that gives a temporary folder, which becomes ``folder`` if its body succeeds.

    Whoever looks finds ``folder`` whole or not at all.

    Args:
        folder: where the result goes; it must not exist, or be empty, unless ``replace``.
        replace: take the place of a folder that is there; who reads one that may be replaced does
            so inside `reading`.
        needs: bytes that will be written; where fewer are free, nothing is begun.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if free < needs:
            raise UserError(
                f"{folder} cannot be written: it takes {format_bytes(needs)}, and "
                f"{format_bytes(free)} are free there; make room or name another place"
            )
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from None
    try:
        with _filling(draft):
            yield draft
        draft.chmod(0o755)  # mkdtemp's are private
        with lock_beside(folder) if replace else contextlib.nullcontext():
            if replace and folder.exists():
                os.replace(folder, draft / "replaced")
            os.replace(draft, folder)
        shutil.rmtree(folder / "replaced", ignore_errors=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def _filling(draft: Path) -> Iterator[None]:
    _live.append(draft)
    try:
        yield
    finally:
        _live.remove(draft)


def is_vacant(folder: Path) -> bool:
    """Whether there is no such folder, or nothing in it."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def require_vacant(folder: Path) -> None:
    """Refuses a folder that holds something, and one whose place no other can take."""
    if not is_vacant(folder):
        raise UserError(f"{folder} exists and is not empty; name a new folder")
    is_current = folder.exists() and folder.samefile(Path())
    if is_current or folder.is_symlink() or os.path.ismount(folder):
        raise UserError(
            f"{folder} is the current folder, a link or where a disk is mounted, and no folder can "
            "take its place; name a new folder"
        )


@contextlib.contextmanager
def array_errors() -> Iterator[None]:
    """Makes what tensorstore says while arrays are written, such as of a full disk, OSErrors.

    Orbax, which calls it, would log a traceback too.
    """
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    except ValueError as error:
        reason = str(error).strip().splitlines()[0].partition(" [")[0]
        raise OSError(reason.rpartition(": ")[2][:200]) from None
    finally:
        logger.disabled = before


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Keeps ``folder`` from being replaced meanwhile.

    What was written with ``replace`` has had its lock since before it was there; other folders have
    none and need none. Nor is there one to take where the place is read-only.
    """
    lock = lock_beside(folder)
    with contextlib.ExitStack() as held:
        if Path(lock.lock_file).exists():
            with contextlib.suppress(OSError):
                held.enter_context(lock)
        yield
