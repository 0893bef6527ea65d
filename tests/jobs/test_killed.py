"""A job that is killed again and again, and started again each time."""

import dataclasses
import json
import multiprocessing
import random
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np

from jkvq.jobs.batch import Window
from jkvq.jobs.job import open_job, run_jobs
from jkvq.llm import with_cache
from jkvq.models.model import Model
from jkvq.support.compile_cache import keep_compiled_programs
from tests import tiny

LINES, KILLS = 300, 10
# One layer, and answers of one token, which need no program of bursts: each process compiles.
CONFIG = dataclasses.replace(tiny.CONFIG, layers=1)


def run(folder: Path, params) -> None:
    """A run of the job, in a process of its own."""
    keep_compiled_programs()
    llm = with_cache(Model("tiny", CONFIG, params, tiny.byte_tokenizer()), "f32,page=8")
    with open_job(folder / "requests.jsonl", folder / "answers.jsonl", max_new_tokens=1) as job:
        run_jobs([job], Window(llm, slots=8).answers, llm.name)


def test_a_job_killed_at_ten_moments_answers_each_line_once(tmp_path):
    lines = [{"prompt": f"Prompt {number}", "temperature": 1} for number in range(LINES)]
    (tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "answers.jsonl"
    params = jax.tree.map(np.asarray, tiny.tiny_model(config=CONFIG).params)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])  # what is imported, is so once
    moments = sorted(random.sample(range(LINES - 20), KILLS))
    for moment in [*moments, None]:
        process = processes.Process(target=run, args=(tmp_path, params))
        process.start()
        while process.is_alive() and (moment is None or _count(out) <= moment):
            time.sleep(0.005)
        process.kill()
        process.join()
        assert process.exitcode == (0 if moment is None else -9), moment
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert Counter(each["line"] for each in found) == dict.fromkeys(range(1, LINES + 1), 1)
    assert {each["error"] for each in found} == {None}


def _count(out: Path) -> int:
    """Answers in the file, the last perhaps in part."""
    return out.read_bytes().count(b"\n") if out.exists() else -1
