"""LongBench as a task: its files, and the best score over the gold answers."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jkvq.support.errors import UserError
from jkvq.tasks.files import read_lines
from jkvq.tasks.longbench.datasets import DATASETS
from jkvq.tasks.longbench.metrics import check_packages, classification
from jkvq.tasks.longbench.truncation import without_middle
from jkvq.tasks.task import Problem, Setting

_SOURCE = "huggingface.co/datasets/zai-org/LongBench"
_FIELDS = ("input", "context", "answers", "all_classes", "_id")


class LongBench:
    """The datasets whose files are there, each a kind of problems."""

    about = "questions, summaries, classes, retrieval and code over long documents, in 21 datasets"

    def problems(self, setting: Setting) -> Iterator[Problem]:
        check_packages()
        for name in _present(setting.data):
            lines = read_lines(setting.data, _file(name), _SOURCE, _FIELDS)
            for line in itertools.islice(lines, setting.limit):
                yield _problem(name, line, setting)

    def score(self, problem: Problem, answer: str) -> float:
        expected = problem.expected
        dataset = DATASETS[expected["dataset"]]
        if dataset.first_line:
            answer = answer.lstrip("\n").split("\n")[0]
        classes = (expected["classes"],) if dataset.metric is classification else ()
        return max(dataset.metric(answer, gold, *classes) for gold in expected["answers"])


def _file(name: str) -> str:
    return f"longbench_{name}.jsonl"


def _present(folder: Path) -> list[str]:
    """The datasets whose files are in the folder."""
    found = [
        name
        for name in DATASETS
        if any((folder / f"{_file(name)}{end}").is_file() for end in ("", ".gz"))
    ]
    if not found:
        raise UserError(
            f"there is no {_file('DATASET')} (or .jsonl.gz) in {folder}, where DATASET is one of "
            f"{', '.join(DATASETS)}: get them from {_SOURCE}, and name their folder with --data"
        )
    return found


def _problem(name: str, line: Any, setting: Setting) -> Problem:
    dataset = DATASETS[name]
    needed = ["answers", "all_classes"] if dataset.metric is classification else ["answers"]
    for field in needed:
        if not (isinstance(line[field], list) and line[field]):
            raise UserError(
                f"{_file(name)}: {field} of {line['_id']} is no list with something in it; get the "
                f"file from {_SOURCE}"
            )
    prompt = without_middle(
        dataset.prompt.format(context=line["context"], input=line["input"]),
        setting.tokenizer,
        setting.context - dataset.max_new_tokens,
        dataset.chat,
    )
    return Problem(
        name=f"{name}/{line['_id']}",
        prompt=prompt,
        expected={"answers": line["answers"], "classes": line["all_classes"], "dataset": name},
        max_new_tokens=dataset.max_new_tokens,
        kind=name,
        chat=dataset.chat,
    )
