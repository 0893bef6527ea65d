"""Prompts as the command line takes them: an argument, standard input or a file."""

import json
import sys
from pathlib import Path
from typing import Any

from jkvq.support.errors import UserError

_LINE = 'each line is {"prompt": "..."} or {"messages": [...]}'


def given_prompts(prompt: str | None, file: Path | None) -> list[Any]:
    """The prompts of an argument or of a file, of which one is to be given."""
    if (prompt is None) == (file is None):
        raise UserError("give either a prompt or --prompts FILE")
    if file is not None:
        return read_prompts(file)
    text = _decoded(sys.stdin.buffer.read(), "standard input") if prompt == "-" else prompt
    if not text:
        raise UserError("the prompt is empty: give at least one word")
    return [text]


def read_prompts(file: Path) -> list[Any]:
    """The prompts of a file: one a line, as text or, if it ends in .jsonl, as JSON."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    lines = enumerate(_decoded(content, str(file)).replace("\r\n", "\n").split("\n"), 1)
    read = _read_json if file.suffix == ".jsonl" else _read_text
    prompts = [read(line, f"{file}, line {number}") for number, line in lines if line.strip()]
    if not prompts:
        raise UserError(f"{file} has no prompts: write one a line")
    return prompts


def _read_text(line: str, place: str) -> str:
    return line


def _read_json(line: str, place: str) -> Any:
    """The text or the messages of a line."""
    try:
        found = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place} is no JSON ({error}): {_LINE}") from None
    kinds = {"prompt": str, "messages": list}
    if not isinstance(found, dict) or len(found) != 1 or found.keys() - kinds:
        raise UserError(f"{place}: {_LINE}, and nothing else")
    ((name, value),) = found.items()
    if not isinstance(value, kinds[name]) or not value:
        raise UserError(f"{place}: {name} is empty or of the wrong form: {_LINE}")
    return value


def _decoded(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is no UTF-8 text (at byte {error.start}): give text") from None
