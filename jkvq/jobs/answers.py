"""The file of answers: a line for each request, whole or not there, kept from run to run."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from filelock import Timeout

from jkvq.engine.options import Options
from jkvq.engine.writer import Generation
from jkvq.jobs.batch import Answer
from jkvq.jobs.lines import RequestLines
from jkvq.jobs.requests import Request
from jkvq.openai.reply import Reply
from jkvq.support.errors import UserError
from jkvq.support.lock import lock_beside

_BEGIN = b'{"line": '  # of every answer


def answer_line(request: Request, answer: Answer, model: str) -> dict[str, Any]:
    """What the file holds of an answer: OpenAI's form where the request has it."""
    number, written, error = answer.index + 1, answer.generation, answer.error
    if request.form != "plain":
        code = "invalid_request" if written is None else "generation_failed"
        line = {"line": number, "id": f"batch_req_{number}", "custom_id": answer.custom_id}
        if written is None or error is not None:
            return {**line, "response": None, "error": {"code": code, "message": error}}
        body = Reply(request.form, str(number), model).whole([written])
        response = {"status_code": 200, "request_id": f"req_{number}", "body": body}
        return {**line, "response": response, "error": None}
    line: dict[str, Any] = {"line": number}
    if answer.custom_id is not None:
        line["custom_id"] = answer.custom_id
    if written is None or error is not None:
        return {**line, "text": None, "error": error}
    return {
        **line,
        "text": written.text,
        "finish_reason": written.finish_reason,
        "prompt_tokens": written.prompt_tokens,
        "completion_tokens": len(written.tokens),
        "cached_tokens": written.cached_tokens,
        "seed": written.seed,
        **_scores(request.options, written),
        "error": None,
    }


def _scores(options: Options, written: Generation) -> dict[str, Any]:
    """The log probabilities that a request asks for, as `Generation` has them."""
    asked: dict[str, Any] = {}
    if options.top_logprobs:
        asked |= {name: getattr(written, name) for name in ("tokens", "logprobs", "top_logprobs")}
    if options.prompt_logprobs:
        asked["prompt"] = asdict(written.prompt)
    return asked


class AnswerFile:
    """The answers to the requests of a file; one that comes after an error takes its place.

    done: which requests have one.
    failed: of which it is an error.
    """

    def __init__(self, path: Path, requests: RequestLines, file: FileIO):
        self._path, self._requests, self._file = path, requests, file
        self.done, self.failed = np.zeros((2, len(requests)), bool)
        self._take_up()

    @property
    def errors(self) -> int:
        """How many answers are errors."""
        return int(self.failed.sum())

    def _take_up(self) -> None:
        """Notes what is answered, and cuts off a last line that a killed run has not ended."""
        whole = 0
        with self._path.open("rb") as written:
            for number, line in enumerate(written, 1):
                if line.endswith(b"\n"):
                    self._note(line, number)
                    whole += len(line)
                elif not line.startswith(_BEGIN[: len(line)]):
                    raise self._foreign(number)
        self._file.truncate(whole)

    def _note(self, line: bytes, number: int) -> None:
        try:
            found = json.loads(line)
            place = self._requests.place(found["line"], found.get("custom_id"))
            failed = found["error"] is not None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise self._foreign(number) from None
        if place is None or (self.done[place] and not self.failed[place]):
            raise self._foreign(number)
        self.done[place], self.failed[place] = True, failed

    def _foreign(self, number: int) -> UserError:
        return UserError(
            f"{self._path}, line {number}, answers no request of {self._requests.path}, or one for "
            "the second time: name another file for the answers"
        )

    def append(self, line: dict[str, Any]) -> None:
        """Writes an answer, unless it is one more error of its request."""
        place, failed = self._requests.place(line["line"], line.get("custom_id")), line["error"]
        assert place is not None
        if failed is not None and self.failed[place]:
            return
        content = json.dumps(line).encode() + b"\n"
        try:
            while content:  # once, unless the disk is full
                content = content[self._file.write(content) :]
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be written: {error.strerror}; the answers so far are kept, "
                "and the same command goes on from them"
            ) from None
        self.done[place], self.failed[place] = True, failed is not None


@contextlib.contextmanager
def open_answers(path: Path, requests: RequestLines) -> Iterator[AnswerFile]:
    """The answers to some requests, while nobody else writes them."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock_beside(path).acquire(timeout=0))
            file = held.enter_context(path.open("ab", buffering=0))
            answers = AnswerFile(path, requests, file)
        except Timeout:
            raise UserError(
                f"another process writes {path}: wait for it, or name another file for the answers"
            ) from None
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from None
        yield answers
