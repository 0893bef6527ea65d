"""From a file of requests to a file of answers, in as many runs as it takes."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jkvq.engine.options import Options
from jkvq.jobs.answers import AnswerFile, answer_line, open_answers
from jkvq.jobs.batch import Answer, Asked
from jkvq.jobs.lines import RequestLines
from jkvq.support.compile_clock import compiling
from jkvq.support.errors import UserError
from jkvq.support.progress import count_bar, spinner


@dataclass
class Tally:
    """What a run has done; ``seconds`` are without those of compilation."""

    read: int = 0
    cached: int = 0
    written: int = 0
    seconds: float = 0.0

    def add(self, answer: Answer) -> None:
        if answer.generation is not None:
            self.read += answer.generation.prompt_tokens
            self.cached += answer.generation.cached_tokens
            self.written += len(answer.generation.tokens)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.written / max(self.seconds, 1e-9)


class Job:
    """Requests, and the answers that there are.

    retry: errors of earlier runs are no answers; their requests are left.
    """

    def __init__(self, requests: RequestLines, answers: AnswerFile, retry: bool = False):
        self._requests, self._answers = requests, answers
        self._kept = answers.done & ~answers.failed if retry else answers.done
        self.total, self.kept = len(requests), int(self._kept.sum())

    @property
    def errors(self) -> int:
        """Answers that are errors, those of earlier runs among them."""
        return self._answers.errors

    def left(self, job: int = 0) -> Iterator[Asked]:
        """Requests that are not answered yet, as those of the job of this number."""
        for index, request in self._requests.left(self._kept):
            yield Asked(job, index, request)

    def keep(self, asked: Asked, answer: Answer, model: str) -> None:
        """Writes an answer to the file."""
        self._answers.append(answer_line(asked.request, answer, model))


# Whatever answers requests: an engine here, or several elsewhere.
Answerer = Callable[[Iterator[Asked]], Iterator[tuple[Asked, Answer]]]


def run_jobs(
    jobs: Sequence[Job], answerer: Answerer, model: str, label: str = "Answering"
) -> Tally:
    """Answers what is left of some jobs; each answer is in its file as soon as it is there."""
    tally, start = Tally(), _now()
    left = (asked for number, job in enumerate(jobs) for asked in job.left(number))
    with count_bar(label, sum(job.total for job in jobs)) as bar:
        if kept := sum(job.kept for job in jobs):
            bar.reach(kept)
        for asked, answer in answerer(left):
            jobs[asked.job].keep(asked, answer, model)
            tally.add(answer)
            tally.seconds = _now() - start
            if tally.written:
                bar.rename(f"{label}, {tally.rate:,.0f} tokens/s")
            bar.advance(1)
    return tally


def _now() -> float:
    return time.perf_counter() - sum(compiling())


@contextlib.contextmanager
def open_job(
    requests: Path, out: Path, *, max_new_tokens: int = 256, seed: int = 0, retry: bool = False
) -> Iterator[Job]:
    """The job of answering a file; goes on where an earlier run has stopped.

    Args:
        requests: a request in each line; see `jkvq.batch`.
        out: where the answers are or will be; nobody else can open it as a job meanwhile.
        max_new_tokens: of requests that do not say.
        seed: requests that draw and name no seed get one made of it and their line's number.
        retry: try again what failed in an earlier run.
    """
    defaults = Options(max_new_tokens=max_new_tokens, seed=seed)
    if out.exists() and requests.exists() and out.samefile(requests):
        raise UserError(f"{out} is the file of requests: name another for the answers")
    with contextlib.ExitStack() as held:
        with spinner("Reading the requests"):
            lines = held.enter_context(contextlib.closing(RequestLines(requests, defaults)))
            answers = held.enter_context(open_answers(out, lines))
        yield Job(lines, answers, retry)
