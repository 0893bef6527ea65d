"""A file of requests: where its lines are, and in which order they share most.

Of each line only 60 bytes are held; it is read again when its turn comes.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from jkvq.engine.options import Options
from jkvq.engine.prompt import Prompt
from jkvq.jobs.requests import Request, parse_request
from jkvq.support.errors import UserError

# Prompts are put beside each other that are alike up to the first of these characters, among those
# the ones alike up to the second, and so on.
_ALIKE = tuple(256 << step for step in range(9))
_HASH = 4  # bytes of each hash
_LINE = np.dtype(
    [("number", "u8"), ("start", "u8"), ("identity", "u8"), ("alike", f"S{_HASH * len(_ALIKE)}")]
)


class RequestLines:
    """The lines of a file that are not blank, by their places among those."""

    def __init__(self, path: Path, defaults: Options):
        self.path, self._defaults = path, defaults
        try:
            if not path.is_file():
                raise UserError(f"there is no file {path}: name one with a request in each line")
            self._file = path.open("rb")
            self._lines = self._look_through()
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        if not len(self._lines):
            raise UserError(f"{path} has no requests: write one in each line")

    def __len__(self) -> int:
        return len(self._lines)

    def _look_through(self) -> np.ndarray:
        found, start = bytearray(), 0
        for number, line in enumerate(self._file, 1):
            if line.strip():
                request = parse_request(line, number, self._defaults)
                alike = _beginnings(request.prompt)
                row = np.array((number, start, _identity(request.custom_id), alike), _LINE)
                found += row.tobytes()
            start += len(line)
        return np.frombuffer(bytes(found), _LINE)

    def place(self, number: object, custom_id: object) -> int | None:
        """Where the line of this number is, if it has this name."""
        numbers = self._lines["number"]
        if not isinstance(number, int) or not 1 <= number <= numbers[-1]:
            return None
        place = int(np.searchsorted(numbers, number))
        named = self._lines["identity"][place] == _identity(custom_id)
        return place if numbers[place] == number and named else None

    def left(self, done: Bool[np.ndarray, " lines"]) -> Iterator[tuple[int, Request]]:
        """Those not done, with their numbers less 1; prompts that begin alike come together.

        Their beginning is then stored once and read by all of them.
        """
        for place in np.argsort(self._lines["alike"], kind="stable"):
            if not done[place]:
                number = int(self._lines["number"][place])
                self._file.seek(int(self._lines["start"][place]))
                yield number - 1, parse_request(self._file.readline(), number, self._defaults)

    def close(self) -> None:
        self._file.close()


def _identity(custom_id: object) -> int:
    """A number for the name of a request."""
    return int.from_bytes(_hash(json.dumps(custom_id).encode(), 8), "little")


def _beginnings(prompt: Prompt | None) -> bytes:
    """Hashes of longer and longer beginnings of a prompt, equal as far as prompts begin alike."""
    if prompt is None:
        return b""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    return b"".join(_hash(text[:end].encode(), _HASH) for end in _ALIKE)


def _hash(content: bytes, size: int) -> bytes:
    return hashlib.blake2b(content, digest_size=size).digest()
