"""What the scores of caches say: means, differences from 16 bits, and how sure they are."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jkvq.tasks.scores import Score
from jkvq.tasks.statistics import Interval, area_over_lengths, mean_score, paired_difference


class Column(NamedTuple):
    """A task, or a part of one, such as a length."""

    task: str
    part: str

    @property
    def title(self) -> str:
        return f"{self.task} {self.part}".strip()


@dataclass(frozen=True)
class Result:
    """A cache on a task; figures are of the requests that could be run, NaN if there are none.

    problems: how many.
    failed: requests that could not be run.
    accuracy: the mean score.
    difference: from the reference's, over the same problems; None of the reference itself, and if
        there is no request that both could run.
    bits: per element, at the mean length of prompt and answer.
    tokens: of an answer, in the mean.
    ended: the part of texts that end by themselves.
    same: the part of texts that are the reference's.
    parted: characters up to where the other texts part from the reference's, the median.
    """

    problems: int
    failed: int
    accuracy: Interval
    difference: Interval | None
    bits: float
    tokens: float
    ended: float
    same: float | None
    parted: float | None


Results = dict[Column, dict[str, Result]]  # by cache


def results_of(
    scores: Mapping[str, Mapping[str, Sequence[Score]]],
    bits: Callable[[str, int], float],
    reference: str,
) -> Results:
    """Results of every column, from scores by cache and task.

    Args:
        scores: of the same problems for each cache.
        bits: per element of a cache at a length.
        reference: the cache that the others are compared with.
    """
    columns = dict.fromkeys(
        Column(task, score.part) for task, some in scores[reference].items() for score in some
    )
    return {
        column: {
            cache: _result(
                _of_part(by_task[column.task], column.part),
                None
                if cache == reference
                else _of_part(scores[reference][column.task], column.part),
                lambda context, cache=cache: bits(cache, context),
            )
            for cache, by_task in scores.items()
        }
        for column in columns
    }


def _of_part(scores: Iterable[Score], part: str) -> list[Score]:
    return [score for score in scores if score.part == part]


def _result(scores: list[Score], base: list[Score] | None, bits: Callable[[int], float]) -> Result:
    answered = [score for score in scores if score.error is None]
    pairs = [
        (ours, theirs)
        for ours, theirs in zip(scores, base or (), strict=base is not None)
        if ours.error is None and theirs.error is None
    ]
    sides = (_by_problem(ours for ours, _ in pairs), _by_problem(theirs for _, theirs in pairs))
    apart = [_shared(a.text, b.text) for a, b in pairs if a.text != b.text]
    context = _mean(score.context for score in answered)
    return Result(
        problems=len(_by_problem(scores)),
        failed=len(scores) - len(answered),
        accuracy=mean_score(_by_problem(answered)),
        difference=paired_difference(*sides) if pairs else None,
        bits=bits(max(1, round(context))) if answered else math.nan,
        tokens=_mean(score.tokens for score in answered),
        ended=_mean(score.ended for score in answered),
        same=1 - len(apart) / len(pairs) if pairs else None,
        parted=float(np.median(apart)) if apart else None,
    )


def _mean(figures: Iterable[float]) -> float:
    """NaN of none."""
    found = list(figures)
    return float(np.mean(found)) if found else math.nan


def _shared(one: str, other: str) -> int:
    """Characters up to where two texts part."""
    pairs = zip(one, other, strict=False)
    parted = (at for at, (a, b) in enumerate(pairs) if a != b)
    return next(parted, min(len(one), len(other)))


def _by_problem(scores: Iterable[Score]) -> np.ndarray:
    """The mean over the samples of each problem."""
    samples: dict[str, list[float]] = {}
    for score in scores:
        samples.setdefault(score.problem, []).append(score.score)
    return np.array([np.mean(each) for each in samples.values()])


def by_kind(scores: Iterable[Score]) -> dict[tuple[str, str], float]:
    """Mean scores by kind and part, of the requests that could be run."""
    found: dict[tuple[str, str], list[float]] = {}
    for score in scores:
        answered = [score.score] if score.error is None else []
        found.setdefault((score.kind, score.part), []).extend(answered)
    return {key: _mean(each) for key, each in found.items()}


def areas(results: Results, task: str) -> dict[str, float]:
    """For each cache the area under its accuracy over the lengths, if the task's parts are such."""
    lengths = [
        int(column.part) for column in results if column.task == task and column.part.isdigit()
    ]
    if len(lengths) < 2:
        return {}
    caches = results[Column(task, str(lengths[0]))]
    return {
        cache: area_over_lengths(
            {length: results[Column(task, str(length))][cache].accuracy.value for length in lengths}
        )
        for cache in caches
    }
