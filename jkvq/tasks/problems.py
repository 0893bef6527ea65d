"""Problems as a file of requests, which `jkvq batch` and others can answer too."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jkvq.engine.options import Options, mixed_seed
from jkvq.support.arguments import INT32, whole
from jkvq.support.atomic import written_whole
from jkvq.support.errors import UserError
from jkvq.tasks.task import Problem

_METADATA = ("expected", "part", "kind")  # for the scores; whoever answers does not look at it


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How answers are drawn.

    samples: answers to each problem.
    temperature: 0 takes the likeliest token; several samples need more.
    max_new_tokens: in the place of the tasks' own, if given.
    seed: of all streams.
    """

    samples: int
    temperature: float
    max_new_tokens: int | None
    seed: int

    def __post_init__(self):
        most = 1 if self.max_new_tokens is None else self.max_new_tokens
        Options(most, self.temperature, seed=self.seed)  # refuses what is bad
        whole("samples", self.samples, 1, INT32, "answers to each problem, 1 or more")
        if self.samples > 1 and self.temperature == 0:
            raise UserError(
                f"samples={self.samples} with temperature 0 are equal texts: give a temperature "
                "such as 0.6, or one sample"
            )


def write_problems(path: Path, problems: Iterable[Problem], sampling: Sampling) -> None:
    """Writes a request for each problem and sample, all or none of them."""
    number = 0
    with written_whole(path) as file:
        for problem in problems:
            for sample in range(sampling.samples):
                number += 1
                file.write(json.dumps(_request(problem, sample, number, sampling)) + "\n")
        if not number:
            raise UserError(f"{path.stem} has no problems: look at its file, or give more lengths")


def _request(problem: Problem, sample: int, number: int, sampling: Sampling) -> dict[str, Any]:
    drawn = {} if sampling.temperature == 0 else {"temperature": sampling.temperature}
    most = sampling.max_new_tokens
    return {
        "custom_id": f"{problem.name}#{sample}",
        "prompt": problem.prompt,
        **({} if problem.chat else {"chat": False}),
        **({"answer_start": problem.answer_start} if problem.answer_start else {}),
        **({"stop": problem.stop} if problem.stop else {}),
        "max_new_tokens": problem.max_new_tokens if most is None else most,
        **drawn,
        "seed": mixed_seed(sampling.seed, number),
        "metadata": {name: getattr(problem, name) for name in _METADATA},
    }


def read_problems(path: Path) -> Iterator[Problem]:
    """The problems of a file, in its order: one for each request."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            found = json.loads(line)
            yield Problem(
                name=found["custom_id"].rpartition("#")[0],
                prompt=found["prompt"],
                max_new_tokens=found["max_new_tokens"],
                chat=found.get("chat", True),
                answer_start=found.get("answer_start", ""),
                stop=tuple(found.get("stop", ())),
                **found["metadata"],
            )
