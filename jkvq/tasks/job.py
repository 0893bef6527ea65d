"""Tasks as a job: the same problems through every cache, in as many runs as it takes.

A job's folder holds problems/TASK.jsonl, answers/CACHE/TASK.jsonl, scores/CACHE/TASK.jsonl and the
report. What is there is not made again; requests that failed are tried again. The folder's job.json
says what the problems were made with, and one beside a cache's answers what those were.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jkvq.attention.implementation import choose_implementation
from jkvq.cache.calibrated import Calibration
from jkvq.cache.footprint import bits_per_element
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.calibration.artefact import calibration_digest
from jkvq.jobs.job import Answerer, Tally, open_job, run_jobs
from jkvq.models.model import Model
from jkvq.support.atomic import written_whole
from jkvq.support.errors import UserError
from jkvq.support.progress import note, spinner
from jkvq.tasks.problems import Sampling, write_problems
from jkvq.tasks.report import write_report
from jkvq.tasks.results import Results, results_of
from jkvq.tasks.scores import Score, read_scores, score_answers
from jkvq.tasks.task import Setting, Task

_MANIFEST = "job.json"


@dataclass(frozen=True)
class TaskJob:
    """Tasks of one model in a folder.

    out: the folder.
    tasks: by their names.
    calibration: of each cache that has one.
    implementation: of the cache's ops; None is the best here.
    """

    out: Path
    tasks: Mapping[str, Task]
    calibration: Callable[[str], Calibration | None] = lambda cache: None
    implementation: str | None = None

    def run(
        self,
        model: Model,
        setting: Setting,
        sampling: Sampling,
        caches: Sequence[str],
        answerer: Callable[[str], Answerer],
    ) -> Results:
        """Has every cache answer, scores the answers, and writes the report.

        Args:
            model: without a cache.
            setting, sampling: how problems are made and answered.
            caches: their names; the others are compared with the first.
            answerer: makes what answers with a cache, if it is needed.
        """
        self.prepare(model, setting, sampling)
        for cache, own in self.to_begin(model, caches).items():
            _begin(self._folder(cache), own)
        for cache in caches:
            tally = self.answer(cache, functools.partial(answerer, cache))
            if tally is not None:
                note(f"{cache}: {tally.written:,} tokens written, {tally.rate:,.1f} tokens/s")
            self.score(cache)
        return self.report(caches, model)

    def to_begin(self, model: Model, caches: Sequence[str]) -> dict[str, dict[str, str | None]]:
        """Caches without answers, and what theirs are made with; refuses others made otherwise."""
        made_with = {cache: self._made_with(cache, model) for cache in caches}
        return {
            cache: own
            for cache, own in made_with.items()
            if not (_has_answers(self._folder(cache)) and _is_begun(self._folder(cache), own))
        }

    def prepare(self, model: Model, setting: Setting, sampling: Sampling) -> None:
        """Writes the problems that are not there yet; refuses a folder of another job."""
        own = {
            "model": model.name,
            "weights": model.fingerprint,
            "lengths": list(setting.lengths),
            "limit": setting.limit,
            **dataclasses.asdict(sampling),
        }
        begun = _is_begun(self.out, own)
        if not model.tokenizer.can_chat:
            note(f"{model.name} has no chat template: problems are given to it as plain text")
        for name, task in self.tasks.items():
            if not begun or not self._problems(name).exists():
                with spinner(f"Preparing {name}"):
                    write_problems(self._problems(name), task.problems(setting), sampling)
        if not begun:
            _begin(self.out, own)

    def answer(self, cache: str, answerer: Callable[[], Answerer]) -> Tally | None:
        """Has a cache answer what it has not answered or what failed; None if there is nothing.

        Args:
            cache: its name.
            answerer: makes what answers, if it is needed.
        """
        with contextlib.ExitStack() as held:
            jobs = [
                held.enter_context(
                    open_job(self._problems(task), self._answers(cache, task), retry=True)
                )
                for task in self.tasks
            ]
            if all(job.kept == job.total for job in jobs):
                return None
            return run_jobs(jobs, answerer(), cache, f"Answering with {cache}")

    def score(self, cache: str) -> None:
        """Scores the answers of a cache that are new."""
        for name, task in self.tasks.items():
            places = self._problems(name), self._answers(cache, name), self._scores(cache, name)
            score_answers(task, *places)

    def report(self, caches: Sequence[str], model: Model) -> Results:
        """Writes what the scores say of caches beside the first, and returns it."""
        scores = {
            cache: {task: list(read_scores(self._scores(cache, task))) for task in self.tasks}
            for cache in caches
        }
        shape = CacheShape.of(model.config)

        def bits(cache: str, context: int) -> float:
            return bits_per_element(parse_spec(cache), shape, context)

        for cache, by_task in scores.items():
            _note_failures(cache, [score for each in by_task.values() for score in each])
        results = results_of(scores, bits, caches[0])
        write_report(self.out, model.name, results, scores, caches[0])
        note(f"the report is {self.out / 'report.md'}")
        return results

    def _made_with(self, cache: str, model: Model) -> dict[str, str | None]:
        """What a cache's answers depend on, besides the model and the problems."""
        best = choose_implementation(None, model.config, parse_spec(cache))
        known = self.calibration(cache)
        return {
            "dtype": model.params["embedding"].dtype.name,
            "implementation": self.implementation or best,
            "calibration": None if known is None else calibration_digest(known)[:12],
        }

    def _problems(self, task: str) -> Path:
        return self.out / "problems" / f"{task}.jsonl"

    def _answers(self, cache: str, task: str) -> Path:
        return self._folder(cache) / f"{task}.jsonl"

    def _folder(self, cache: str) -> Path:
        return self.out / "answers" / cache

    def _scores(self, cache: str, task: str) -> Path:
        return self.out / "scores" / cache / f"{task}.jsonl"


def _has_answers(folder: Path) -> bool:
    """Whether a folder holds any; a run that could not even load its model leaves empty files."""
    return any(place.stat().st_size for place in folder.glob("*.jsonl"))


def _is_begun(folder: Path, own: Mapping[str, Any]) -> bool:
    """Whether a folder's contents are made with the same; refuses what is made otherwise."""
    place = folder / _MANIFEST
    if not place.exists():
        return False
    try:
        kept = json.loads(place.read_text("utf-8"))
        other = next((name for name in own if kept[name] != own[name]), None)
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{place} is no job of ours: name another folder with --out") from None
    if other is not None:
        raise UserError(
            f"{folder} holds answers with {other}={kept[other]}, not {own[other]}: give the same, "
            "or another folder with --out"
        )
    return True


def _begin(folder: Path, own: Mapping[str, Any]) -> None:
    """Notes in a folder what its contents are made with."""
    with written_whole(folder / _MANIFEST) as file:
        json.dump(own, file, indent=1)


def _note_failures(cache: str, scores: Sequence[Score]) -> None:
    failed = sum(score.error is not None for score in scores)
    if failed:
        note(
            f"{cache}: {failed:,} of {len(scores):,} requests could not be run and are left out of "
            "its figures; the same command tries them again"
        )
