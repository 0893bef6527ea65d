"""The task RULER, of eleven kinds of problems.

Prompts, answers' starts, parameters and score are those of NVIDIA's RULER (Hsieh et al., 2024).
Left out are its two kinds made of data sets, qa_1 (SQuAD) and qa_2 (HotpotQA).
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jkvq.evaluation.needles import read_haystack
from jkvq.support.errors import UserError, nearest
from jkvq.tasks.ruler import needles, variable_tracking, word_counts
from jkvq.tasks.ruler.fitting import Draw, fitted_problems
from jkvq.tasks.task import Problem, Setting

KINDS = (*needles.KINDS, "vt", "cwe", "fwe")


@dataclass(frozen=True)
class Ruler:
    """Problems at every length of a setting; those in essays take the data folder's `haystack`."""

    about = "RULER: needles, variable tracking and word counts at any length"
    kinds: tuple[str, ...] = KINDS

    def __post_init__(self):
        for kind in self.kinds:
            if kind not in KINDS:
                raise UserError(f"RULER has no kind '{kind}': {nearest(kind, KINDS)}")

    def problems(self, setting: Setting) -> Iterator[Problem]:
        return fitted_problems({kind: _draw(kind, setting) for kind in self.kinds}, setting)

    def score(self, problem: Problem, answer: str) -> float:
        """The part of the expected strings that occur in the answer, in capitals or not."""
        found = [expected.lower() in answer.lower() for expected in problem.expected]
        return sum(found) / len(found)


def _draw(kind: str, setting: Setting) -> Draw:
    if kind == "cwe":
        return word_counts.draw_common
    if kind == "fwe":
        return word_counts.draw_frequent
    if kind == "vt":
        example = variable_tracking.example_sentences(setting.tokenizer)
        return lambda chance, length: variable_tracking.draw(chance, example)
    hidden = needles.KINDS[kind]
    essay = _essay_words(setting.data / "haystack") if hidden.haystack == "essay" else ()
    return lambda chance, length: hidden.draw(chance, essay)


@functools.lru_cache(maxsize=1)
def _essay_words(folder: Path) -> tuple[str, ...]:
    words = tuple(read_haystack(folder).split()) if any(folder.glob("*.txt")) else ()
    if not words:
        raise UserError(
            f"RULER hides needles in essays, and {folder} has none: put .txt files with English "
            "prose there, and name the folder around it with --data"
        )
    return words
