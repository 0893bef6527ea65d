"""What a task is: problems to put to a model, and what an answer is worth."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jkvq.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Problem:
    """One question, and what is needed to score an answer; all of it can be written as JSON.

    name: unlike that of any other problem of its task.
    prompt: what the model is asked.
    expected: what the task compares an answer with.
    max_new_tokens: of an answer.
    part: the column of the report that it counts in, where a task has several, such as a length.
    kind: the row of the finer report, where a task has several kinds of problems.
    chat: put the prompt into the model's chat template, if it has one.
    answer_start: how the answer begins, given to the model; it is not part of what is scored.
    stop: strings that end an answer.
    """

    name: str
    prompt: str
    expected: Any
    max_new_tokens: int
    part: str = ""
    kind: str = ""
    chat: bool = True
    answer_start: str = ""
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """What problems are made for.

    tokenizer: that counts a prompt's tokens.
    context: tokens of the longest sequence of the model.
    data: the folder with the tasks' files.
    lengths: tokens of a prompt and its answer, of tasks that are made at any length.
    limit: problems of each part and kind at most; None is all that there are.
    seed: of tasks that are made by chance.
    """

    tokenizer: Tokenizer
    context: int
    data: Path
    lengths: tuple[int, ...]
    limit: int | None
    seed: int


class Task(Protocol):
    """Problems, and the score of an answer.

    about: a line for the list of tasks.
    """

    about: str

    def problems(self, setting: Setting) -> Iterator[Problem]:
        """The same problems, in the same order, for the same setting."""
        ...

    def score(self, problem: Problem, answer: str) -> float:
        """From 0 to 1; an answer that cannot be read is worth 0."""
        ...
