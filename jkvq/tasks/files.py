"""The files of published tasks, as their authors give them out."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jkvq.support.errors import UserError


def read_lines(folder: Path, name: str, source: str, fields: tuple[str, ...]) -> Iterator[Any]:
    """The objects of a file of JSON lines, each with the fields that a task needs.

    Args:
        folder: where the user keeps the files.
        name: of the file; with .gz behind it is as good.
        source: where the file comes from, for those who do not have it.
        fields: that every line must have.
    """
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise UserError(
            f"there is no {name} (or {name}.gz) in {folder}: get it from {source}, and name its "
            "folder with --data"
        )
    number = 1
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                if line.strip():
                    found = json.loads(line)
                    yield {**found, **{field: found[field] for field in fields}}
                number += 1
    except KeyError as error:
        raise UserError(
            f"{path}, line {number}, has no field {error}: get it from {source}"
        ) from None
    except (OSError, EOFError, ValueError, TypeError) as error:
        raise UserError(f"{path}, line {number}, cannot be read: {error}") from None
