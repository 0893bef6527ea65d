"""Needles by depth and length, as Block-GTQ has them: `jkvq eval niah` as a task."""

import itertools
from collections.abc import Iterator

from jkvq.evaluation.needles import TASKS, answer_tokens, questions, read_haystack, score
from jkvq.support.errors import UserError
from jkvq.tasks.task import Problem, Setting

_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_TRIALS = 3  # haystacks for each kind, length and depth


class NeedleGrid:
    """Six kinds of needles at five depths; a length is that of prompt and answer together."""

    about = "needles in essays by depth and length (Block-GTQ, appendix D.1)"

    def problems(self, setting: Setting) -> Iterator[Problem]:
        folder = setting.data / "haystack"
        if not folder.is_dir():
            raise UserError(
                f"there is no folder {folder}: put essays in it as .txt files, as for RULER"
            )
        haystack = read_haystack(folder)
        for length, kind in itertools.product(setting.lengths, TASKS):
            if length > setting.context:
                raise UserError(f"length={length}: the model's context is {setting.context}")
            made = self._of_kind(kind, haystack, length, setting)
            yield from itertools.islice(made, setting.limit)

    def _of_kind(
        self, kind: str, haystack: str, length: int, setting: Setting
    ) -> Iterator[Problem]:
        task = TASKS[kind]
        budget = answer_tokens(task)
        for trial, depth in itertools.product(range(_TRIALS), _DEPTHS):
            drawn = setting.seed * _TRIALS + trial
            asked = questions(task, setting.tokenizer, haystack, length - budget, depth, drawn)
            for number, question in enumerate(asked):
                yield Problem(
                    name=f"{kind}/{length}/{depth}/{trial}/{number}",
                    prompt=question.prompt,
                    expected=list(question.expected),
                    max_new_tokens=budget,
                    part=str(length),
                    kind=kind,
                    answer_start=question.answer_start,
                )

    def score(self, problem: Problem, answer: str) -> float:
        return score(problem.expected, answer)
