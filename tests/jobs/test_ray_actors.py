"""The same job on Ray: `pytest -m slow` with the extra `ray` installed."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from jkvq.jobs.batch import Window
from jkvq.jobs.job import open_job, run_jobs
from jkvq.jobs.ray_actors import ray_answerer
from jkvq.support.errors import UserError
from tests.tiny import tiny_llm

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

LINES = [
    {"prompt": f"Prompt {number}", "temperature": number % 2, "max_new_tokens": 4 + number % 9}
    for number in range(60)
]


def load():
    return tiny_llm("int4,page=8")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    root = str(Path(__file__).parents[2])
    ray.init(
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}},
    )
    yield
    ray.shutdown()


def answered(folder: Path, answerer) -> dict[int, str]:
    requests, out = folder / "requests.jsonl", folder / "answers.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    with open_job(requests, out) as job:
        run_jobs([job], answerer, "tiny")
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(found) == len(LINES) == len({each["line"] for each in found})
    assert {each["error"] for each in found} == {None}
    return {each["line"]: each["text"] for each in found}


def actors() -> list[int]:
    """The processes that Ray has named after the work of Ray Data's actors."""
    named = ((path.parent.name, path.read_bytes()) for path in Path("/proc").glob("[0-9]*/cmdline"))
    return [int(number) for number, name in named if name.startswith(b"ray::MapWorker")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[int, str]:
    """The answers of one process."""
    return answered(tmp_path_factory.mktemp("alone"), Window(load(), slots=4).answers)


def test_two_actors_give_the_answers_of_one_process(tmp_path, alone):
    assert answered(tmp_path, ray_answerer(load, "local", actors=2, slots=4)) == alone


def test_a_killed_actor_costs_nothing_but_time(tmp_path, alone):
    killed = []

    def kill_one() -> None:
        for _ in range(600):
            if living := actors():
                time.sleep(2)  # it loads, or answers
                os.kill(living[0], signal.SIGKILL)
                killed.append(living[0])
                return
            time.sleep(0.1)

    killer = threading.Thread(target=kill_one)
    killer.start()
    found = answered(tmp_path, ray_answerer(load, "local", actors=2, slots=4))
    killer.join()
    assert killed
    assert found == alone


def test_more_actors_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 2.0})
    with pytest.raises(UserError, match=r"actors=3: the cluster has 2 GPU\(s\)"):
        ray_answerer(load, "local", actors=3)
