"""Scores of answers: made once, in the problems' order, and kept."""

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jkvq.support.atomic import written_whole
from jkvq.support.progress import count_bar
from jkvq.tasks.problems import read_problems
from jkvq.tasks.task import Problem, Task

_AT_ONCE = 4  # answers: those that are programs run in processes of their own


@dataclass(frozen=True)
class Score:
    """What an answer was worth.

    problem, part, kind: see `jkvq.tasks.task.Problem`.
    score: from 0 to 1; it says nothing if there is an error.
    ended: whether the text ended by itself, not at its limit.
    context, tokens: of the prompt and the answer together, and of the answer.
    error: why the request could not be run.
    """

    problem: str
    part: str
    kind: str
    score: float
    ended: bool
    context: int
    tokens: int
    expected: Any
    text: str
    error: str | None = None


def score_answers(task: Task, problems: Path, answers: Path, place: Path) -> None:
    """Scores a file of answers; what there is of the same answers is kept."""
    kept = list(read_scores(place)) if place.exists() else []
    with answers.open(encoding="utf-8") as lines:
        by_line = {found["line"]: found for found in map(json.loads, lines)}

    def scored(number: int, problem: Problem) -> Score:
        found = by_line[number]
        text, error = found["text"] or "", found["error"]
        before = kept[number - 1] if kept else None
        if before is not None and (before.text, before.error) == (text, error):
            return before
        return Score(
            *(problem.name, problem.part, problem.kind),
            score=task.score(problem, text) if text else 0.0,
            ended=found.get("finish_reason") == "stop",
            context=found.get("prompt_tokens", 0) + found.get("completion_tokens", 0),
            tokens=found.get("completion_tokens", 0),
            expected=problem.expected,
            text=text,
            error=error,
        )

    scores = []
    with count_bar("Scoring", len(by_line)) as bar, ThreadPoolExecutor(_AT_ONCE) as pool:
        for score in pool.map(scored, itertools.count(1), read_problems(problems)):
            scores.append(score)
            bar.advance(1)
    if scores != kept:
        with written_whole(place) as file:
            for score in scores:
                file.write(json.dumps(asdict(score), ensure_ascii=False) + "\n")


def read_scores(place: Path) -> Iterator[Score]:
    """The scores of a file, in the problems' order, the samples of a problem together."""
    with place.open(encoding="utf-8") as file:
        for line in file:
            yield Score(**json.loads(line))
