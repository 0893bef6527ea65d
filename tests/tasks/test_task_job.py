"""Jobs of tasks: the same problems for all, kept answers, and a second run that adds nothing."""

import dataclasses
import json
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest

import jkvq
from jkvq.cache.calibrated import Calibration, SideCalibration
from jkvq.jobs.batch import Answer, Asked, Window
from jkvq.jobs.job import Answerer
from jkvq.jobs.requests import read_request
from jkvq.support.compile_cache import keep_compiled_programs
from jkvq.tasks.job import TaskJob
from jkvq.tasks.problems import Sampling, read_problems, write_problems
from jkvq.tasks.results import Column, Results
from jkvq.tasks.task import Problem, Setting
from tests.tiny import CONFIG, byte_tokenizer, model_of


class Letters:
    """Asks for a text with a letter in it."""

    about = "letters"

    def problems(self, setting: Setting) -> Iterator[Problem]:
        for number, letter in enumerate("etaoinshrdlu"[: setting.limit]):
            prompt = f"Write {letter}, {'and ' * number}please"
            yield Problem(f"{letter}", prompt, letter, 12, kind=letter, answer_start=" Here")

    def score(self, problem: Problem, answer: str) -> float:
        return float(problem.expected in answer)


SAMPLING = Sampling(samples=1, temperature=0.0, max_new_tokens=None, seed=3)


def setting(llm, limit: int | None = None) -> Setting:
    return Setting(llm.tokenizer, llm.config.context, Path("."), (), limit, seed=0)


def run(
    out: Path,
    llm,
    caches=("f32", "int4,page=8"),
    sampling=SAMPLING,
    without_room: str | None = None,
    limit: int | None = None,
    **made_with,
) -> Results:
    """Runs the job.

    Args:
        without_room: the cache that has no room for the first two problems.
        made_with: fields of the job.
    """
    job, model = TaskJob(out, {"letters": Letters()}, **made_with), model_of(llm)

    def answerer(cache: str) -> Answerer:
        answers = Window(jkvq.with_cache(model, cache)).answers
        return short_of_room(answers) if cache == without_room else answers

    return job.run(model, setting(llm, limit), sampling, caches, answerer)


def short_of_room(answers: Answerer) -> Answerer:
    """An answerer to whom the first two problems are too long."""

    def some(requests: Iterator[Asked]) -> Iterator[tuple[Asked, Answer]]:
        for asked, answer in answers(requests):
            refused = Answer(asked.index, answer.custom_id, None, "too long")
            yield asked, refused if asked.index < 2 else answer

    return some


def files(out: Path) -> dict[str, bytes]:
    """What a job says in the end; answers say in which order they came."""
    found = {p for p in out.rglob("*") if p.is_file() and "answers" not in p.parts}
    return {str(p.relative_to(out)): p.read_bytes() for p in found if p.name[0] != "."}


def test_problems_are_requests_and_come_back_as_they_were(tmp_path):
    problems = [
        Problem("a/1", "One?", ["1", "one"], 7, part="64", kind="few", stop=("\n",)),
        Problem("b", "Zwei? ü", {"x": None}, 9, chat=False, answer_start=" So"),
    ]
    write_problems(tmp_path / "p.jsonl", problems, Sampling(2, 0.5, None, 0))
    assert list(read_problems(tmp_path / "p.jsonl")) == [p for p in problems for _ in range(2)]
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["a/1#0", "a/1#1", "b#0", "b#1"]
    assert len({line["seed"] for line in lines}) == 4
    read = [read_request(line, 1, jkvq.Options()) for line in lines]
    assert [request.error for request in read] == [None] * 4
    options = read[2].options
    assert (options.chat, options.answer_start, options.temperature) == (False, " So", 0.5)


def test_a_second_run_adds_nothing(tmp_path, tiny):
    run(tmp_path, tiny)
    first = files(tmp_path)
    assert {"report.md", "results.json", "scores/int4,page=8/letters.jsonl"} <= first.keys()
    run(tmp_path, tiny)
    assert files(tmp_path) == first


def test_every_cache_gets_the_same_problems_and_scores_follow_the_texts(tmp_path, tiny):
    run(tmp_path, tiny)
    for cache in ("f32", "int4,page=8"):
        lines = (tmp_path / "scores" / cache / "letters.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        assert [each["problem"] for each in found] == list("etaoinshrdlu")
        for each in found:
            assert each["score"] == (each["expected"] in each["text"])
        assert sum(each["tokens"] for each in found) > 0
    alone = jkvq.generate(tiny, "Write e, please", max_new_tokens=12, answer_start=" Here")
    first = (tmp_path / "scores" / "f32" / "letters.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["text"] == alone.text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"limit": 3}, "holds answers with limit=None, not 3: give the same, or another folder"),
        ({"sampling": Sampling(1, 0.5, None, 3)}, "holds answers with temperature=0.0, not 0.5"),
    ],
)
def test_another_job_in_the_same_folder_is_refused(tmp_path, tiny, changes, sentence):
    run(tmp_path, tiny, caches=("f32",))
    before = files(tmp_path)
    with pytest.raises(jkvq.UserError, match=sentence):
        run(tmp_path, tiny, **changes)
    assert files(tmp_path) == before


def test_answers_made_otherwise_are_refused(tmp_path, tiny):
    def calibration(clip: float):
        known = Calibration(key=SideCalibration(clip=np.full(2, clip, np.float32)))
        return {"f32": None, "int4,page=8": known}.get

    rounded = {**tiny.params, "embedding": tiny.params["embedding"].astype("bfloat16")}
    same = {"implementation": "reference", "calibration": calibration(1)}
    run(tmp_path, tiny, limit=2, calibration=calibration(1))
    before = files(tmp_path)
    for llm, changes, sentence in (
        (dataclasses.replace(tiny, params=rounded), {}, "f32 .* dtype=float32, not bfloat16: give"),
        (tiny, {"implementation": "pallas"}, "f32 .* implementation=reference, not pallas: give"),
        (tiny, {"calibration": calibration(2)}, r"int4,page=8 .* calibration=\w{12}, not \w{12}: "),
    ):
        with pytest.raises(jkvq.UserError, match=f"/answers/{sentence}"):
            run(tmp_path, llm, limit=2, **{**same, **changes})
    run(tmp_path, tiny, limit=2, **same)
    assert files(tmp_path) == before


def test_a_run_that_could_not_begin_holds_nobody_up(tmp_path, tiny, monkeypatch):
    """It has noted how its answers were to be made, and has made none."""
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("jkvq.tasks.job.run_jobs", Mock(side_effect=MemoryError))
        run(tmp_path, tiny, limit=2, implementation="pallas")
    assert run(tmp_path, tiny, limit=2, implementation="reference")


def test_requests_that_failed_are_named_left_out_and_tried_again(tmp_path, tiny, capsys):
    whole, out = tmp_path / "whole", tmp_path / "out"
    run(whole, tiny, limit=4)
    found = run(out, tiny, limit=4, without_room="f32")
    sentence = "f32: 2 of 4 requests could not be run and are left out of its figures"
    assert capsys.readouterr().err.count(sentence) == 1
    assert [each.failed for each in found[Column("letters", "")].values()] == [2, 0]
    scores = (out / "scores" / "f32" / "letters.jsonl").read_text().splitlines()
    assert [json.loads(line)["error"] for line in scores] == ["too long"] * 2 + [None] * 2
    kept = {path: path.read_bytes() for path in out.rglob("*.jsonl")}
    run(out, tiny, limit=4, without_room="f32")  # as before
    assert {path: path.read_bytes() for path in out.rglob("*.jsonl")} == kept
    capsys.readouterr()
    run(out, tiny, limit=4)
    assert "could not be run" not in capsys.readouterr().err
    assert files(out) == files(whole)
    assert all(path.read_bytes().startswith(kept[path]) for path in out.glob("answers/*/*.jsonl"))


def test_problems_that_could_not_be_made_bind_nobody(tmp_path, tiny, monkeypatch):
    def missing(self, setting):
        yield Problem("a", "One?", "1", 3)
        raise jkvq.UserError("there is no file")

    with monkeypatch.context() as patch, pytest.raises(jkvq.UserError, match="there is no file"):
        patch.setattr(Letters, "problems", missing)
        run(tmp_path, tiny, caches=("f32",))
    assert files(tmp_path) == {}
    run(tmp_path, tiny, caches=("f32",), limit=2)


def test_a_folder_that_is_no_job_is_refused(tmp_path, tiny):
    (tmp_path / "job.json").write_text("[]")
    with pytest.raises(jkvq.UserError, match=r"job.json is no job of ours"):
        run(tmp_path, tiny)


def test_several_equal_samples_are_refused():
    with pytest.raises(jkvq.UserError, match="samples=4 with temperature 0 are equal texts"):
        Sampling(4, 0.0, None, 0)


def test_an_answer_without_text_is_a_miss_and_an_error_is_none(tmp_path, tiny):
    job = TaskJob(tmp_path, {"letters": Letters()})
    job.prepare(model_of(tiny), setting(tiny, 2), SAMPLING)
    answers = tmp_path / "answers" / "f32" / "letters.jsonl"
    answers.parent.mkdir(parents=True)
    lines = [
        {"line": 1, "custom_id": "e#0", "text": None, "error": "not to be told"},
        {"line": 2, "custom_id": "t#0", "text": "", "finish_reason": "stop", "error": None},
    ]
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
    place = tmp_path / "scores" / "f32" / "letters.jsonl"
    for _ in range(2):
        job.score("f32")
        scores = [json.loads(line) for line in place.read_text().splitlines()]
        assert [each["score"] for each in scores] == [0, 0]
        assert [each.pop("error") for each in scores] == ["not to be told", None]
        place.write_text("".join(json.dumps(each) + "\n" for each in scores))  # as it once was


def go_on(out: Path, params) -> None:
    """A run of the job, in a process of its own."""
    keep_compiled_programs()
    model = jkvq.Model("tiny", CONFIG, params, byte_tokenizer())
    run(out, jkvq.with_cache(model, "f32"))


def test_a_killed_job_ends_with_the_same_bytes(tmp_path, tiny):
    whole, out = tmp_path / "whole", tmp_path / "killed"
    run(whole, tiny)
    params = jax.tree.map(np.asarray, tiny.params)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])  # what is imported, is so once
    for answered in (2, 14, None):  # of 24, by the two caches
        process = processes.Process(target=go_on, args=(out, params))
        process.start()
        while process.is_alive() and (answered is None or _answers(out) < answered):
            time.sleep(0.002)
        process.kill()
        process.join()
        assert process.exitcode == (0 if answered is None else -9), answered
    assert files(out) == files(whole)


def _answers(out: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in out.glob("answers/*/*.jsonl"))
