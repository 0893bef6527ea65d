"""Folders that are written whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jkvq.errors import UserError


@contextlib.contextmanager
def drafted(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to write in, beside ``folder``, whose name it takes if nothing goes wrong.

    ``folder`` must not exist or be empty by then, unless ``replace``.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from None
    try:
        yield draft
        draft.chmod(0o755)  # mkdtemp's are private
        if replace and folder.exists():
            os.replace(folder, draft / "replaced")
        os.replace(draft, folder)
        shutil.rmtree(folder / "replaced", ignore_errors=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
