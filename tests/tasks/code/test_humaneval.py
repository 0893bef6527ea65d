import dataclasses
import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jkvq.models.tokenizer import Tokenizer
from jkvq.support.errors import UserError
from jkvq.tasks.code.humaneval import HumanEval, program_of
from jkvq.tasks.task import Problem, Setting
from tests.tiny import byte_tokenizer

DATA = Path(__file__).parents[4] / "shared" / "data"

CODE = '''import math


def half(x: int) -> int:
    """ Half of x, rounded down.
    >>> half(5)
    2
    """
    return math.floor(x / 2)


def quarter(x: int) -> int:
    """ A quarter of x, rounded down.
    >>> quarter(9)
    2
    """
'''
TEST = """

METADATA = {'author': 'us'}


def check(candidate):
    assert candidate(9) == 2
    assert candidate(-1) == half(half(-1)) == -1
"""
LINE = {"task_id": "HumanEval/0", "prompt": CODE, "entry_point": "quarter", "test": TEST}
BODY = "    return half(half(x))\n"
FUNCTION = f"def quarter(x):\n{BODY}"


def _tokenizer(can_chat: bool) -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.hf.chat_template = "{{ messages[0]['content'] }}" if can_chat else None
    return tokenizer


def _setting(data: Path, *, can_chat: bool = True, limit: int | None = None) -> Setting:
    return Setting(_tokenizer(can_chat), 1024, data, (), limit, 0)


@pytest.fixture
def data(tmp_path):
    lines = [LINE, {**LINE, "task_id": "HumanEval/1"}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return tmp_path


def test_a_model_that_chats_is_given_the_beginning_of_its_answer(data):
    problems = list(HumanEval().problems(_setting(data)))
    assert [problem.name for problem in problems] == ["HumanEval/0", "HumanEval/1"]
    first = problems[0]
    assert first.prompt == (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{CODE}\n```\n"
    )
    assert first.answer_start == f"Here is the completed function:\n```python\n{CODE}\n"
    assert first.stop == ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
    assert (first.chat, first.max_new_tokens) == (True, 1024)
    assert list(HumanEval().problems(_setting(data, limit=1))) == problems[:1]


def test_a_model_that_does_not_chat_completes_the_code(data):
    problem = next(HumanEval().problems(_setting(data, can_chat=False)))
    assert (problem.prompt, problem.answer_start, problem.chat) == (CODE, "", False)
    assert problem.stop == ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
    assert HumanEval().score(problem, BODY) == 1


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (BODY, 1),
        (f"{BODY}```\n\nThis halves `x` twice.\n```python\nquarter(9)\n```", 1),
        (f"\n{BODY}\n\n\n", 1),
        (FUNCTION, 1),
        (f"```python\n{FUNCTION}```", 1),
        (f"Here it is:\n\n```python\nimport math\n\n{FUNCTION}```\nIt halves twice.", 1),
        (f"Here it is:\n```\n{FUNCTION}", 1),
        (f"First:\n```python\nhalf(9)\n```\nthen\n```python\n{FUNCTION}```", 1),
        ("    return x // 4\n", 1),
        ("    return x / 4\n", 0),
        (f"    return x / 4\n```\nor\n```python\n{FUNCTION}```", 0),
        ("    return half(half(x)", 0),
        ("    exit(0)\n", 0),
        ("    pass\n\n\ndef check(candidate):\n    pass\n", 0),
        ("```python\nprint('passed')\n```", 0),
        ("I cannot answer.", 0),
        ("", 0),
    ],
)
def test_an_answer_scores_if_its_program_passes(data, answer, score):
    problem = next(HumanEval().problems(_setting(data)))
    kept = json.loads(json.dumps(dataclasses.asdict(problem)))  # as a job writes it
    assert HumanEval().score(Problem(**kept), answer) == score


def test_the_program_is_the_code_and_the_answer_up_to_a_fence():
    assert program_of(f"{BODY}```\nmore", CODE, "quarter") == CODE + BODY
    assert program_of(BODY, CODE, "quarter") == CODE + BODY
    assert program_of("no code", CODE, "quarter") == f"{CODE}no code"


def test_a_missing_file_is_named_with_its_source(tmp_path):
    with pytest.raises(UserError, match=r"no HumanEval\.jsonl .*github\.com/openai/human-eval"):
        next(HumanEval().problems(_setting(tmp_path)))


def test_published_solutions_pass():
    file = DATA / "HumanEval.jsonl.gz"
    if not file.is_file():
        pytest.skip(f"HumanEval.jsonl.gz is not in {DATA}")
    problems = list(HumanEval().problems(_setting(DATA)))
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        solutions = [json.loads(line)["canonical_solution"] for line in lines]
    assert len(problems) == len({problem.name for problem in problems}) == 164
    chosen = [32, 38, 50, 75, 139, 163]  # the first three have helpers in what the model is given
    with ThreadPoolExecutor(2) as pool:
        scores = pool.map(lambda i: HumanEval().score(problems[i], solutions[i]), chosen)
        wrong = pool.map(lambda i: HumanEval().score(problems[i], "    pass\n"), chosen)
    assert [*scores, *wrong] == [1.0] * 6 + [0.0] * 6
