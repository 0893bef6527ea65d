"""Every task through the command, with files of our own in the form of the tasks'."""

import json
from pathlib import Path

import pytest

import jkvq
from jkvq.tasks.catalog import TASKS
from tests.cli.running import run, run_json

SUMS = [(2, 3), (10, 4), (7, 5), (20, 22), (1, 1)]
FUNCTION = "def add(a, b):\n    '''The sum of a and b.'''\n"
FILES = {
    "gsm8k_test.jsonl": [
        {"question": f"Ann has {a} pears and gets {b} more. How many?", "answer": f"#### {a + b}"}
        for a, b in SUMS
    ],
    "math500_test.jsonl": [
        {"problem": f"What is ${a} + {b}$?", "answer": f"{a + b}", "unique_id": f"sums/{a}"}
        for a, b in SUMS
    ],
    "aime24_test.jsonl": [
        {"id": a, "problem": f"Find ${a} + {b}$.", "answer": f"{a + b}"} for a, b in SUMS
    ],
    "HumanEval.jsonl": [
        {
            "task_id": f"HumanEval/{number}",
            "prompt": FUNCTION,
            "entry_point": "add",
            "canonical_solution": "    return a + b\n",
            "test": f"def check(candidate):\n    assert candidate({a}, {b}) == {a + b}\n",
        }
        for number, (a, b) in enumerate(SUMS)
    ],
    "longbench_passage_count.jsonl": [
        {
            "_id": f"{number}",
            "input": "",
            "context": "Paragraph 1: A hen.\n\nParagraph 2: A cow.",
            "answers": ["2"],
            "length": 8,
            "dataset": "passage_count",
            "language": "en",
            "all_classes": None,
        }
        for number in range(5)
    ],
}


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "data"
    (folder / "haystack").mkdir(parents=True)
    for name, lines in FILES.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    essay = " ".join(f"The harbour was quiet on day {day}." for day in range(400))
    (folder / "haystack" / "essay.txt").write_text(essay)
    return folder


def answered(data: Path, out: Path, tasks: str, *more: str) -> dict[tuple[str, ...], int]:
    """Problems by task, part and cache, of a job that is run twice: the second adds nothing."""
    given = ("--data", str(data), "--out", str(out), "--tasks", tasks, "--dtype", "float32")
    first = run_json("eval", "tasks", *given, *more)["results"]
    before = {path: path.read_bytes() for path in out.rglob("*.jsonl")}
    assert run_json("eval", "tasks", *given, *more)["results"] == first
    assert {path: path.read_bytes() for path in out.rglob("*.jsonl")} == before
    return {(each["task"], each["part"], each["cache"]): each["problems"] for each in first}


READ, MADE = "gsm8k,math500,aime24,humaneval,longbench", "ruler,niah,mrcr"


def test_tasks_from_files_run_on_the_default_model(smollm2_file, data, tmp_path):
    found = answered(data, tmp_path / "out", READ, "--limit", "4", "-n", "3")
    assert found == {(task, "", "bf16"): 4 for task in READ.split(",")}
    assert {*READ.split(","), *MADE.split(",")} == set(TASKS)


@pytest.mark.slow
def test_tasks_of_any_length_run_on_the_default_model(smollm2_file, data, tmp_path):
    more = ("--limit", "4", "-n", "4", "--cache", "int4", "--lengths", "1664")
    found = answered(data, tmp_path / "out", MADE, *more)
    assert found == {
        (task, "1664", cache): 4 * kinds
        for task, kinds in {"ruler": 11, "niah": 6, "mrcr": 3}.items()
        for cache in ("bf16", "int4")
    }


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tasks", "gms8k"], "task 'gms8k' is not known: did you mean gsm8k"),
        (["--tasks", "gsm8k", "--samples", "3"], "samples=3 with temperature 0 are equal texts"),
        (["--tasks", "gsm8k", "--limit", "0"], "limit=0: at least 1"),
        (["--tasks", "gsm8k", "-n", "0"], "max_new_tokens=0: a whole number, 1 or more"),
        (["--tasks", "ruler", "--lengths", "4k"], "lengths=4k: whole numbers"),
        (["--tasks", "gsm8k", "--cache", "kivi-int2"], "cache 'kivi-int2' exists in"),
        (["--tasks", "gsm8k", "--actors", "0"], "actors=0: at least 1"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(tmp_path, arguments, sentence):
    with pytest.raises(jkvq.UserError, match=sentence):
        run("eval", "tasks", "--out", str(tmp_path / "out"), *arguments, "--model", "no-such-model")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_there_is_named_with_its_source(model, tmp_path):
    with pytest.raises(jkvq.UserError, match=r"there is no gsm8k_test.jsonl .* get it from "):
        run("eval", "tasks", "--out", str(tmp_path), "--tasks", "gsm8k", "--model", model)
