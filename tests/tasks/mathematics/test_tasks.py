import gzip
import json
import re
from pathlib import Path

import pytest

from jkvq.support.errors import UserError
from jkvq.tasks.mathematics.tasks import Aime24, Gsm8k, Math500
from jkvq.tasks.task import Setting
from tests.tiny import byte_tokenizer

DATA = Path(__file__).parents[4] / "shared" / "data"

GSM8K = [
    {
        "question": "Ann has 1,000 and 80 pens.",
        "answer": "Add: <<1000+80=1080>>\n#### 1,080",
    },
    {"question": "Bob owes 3. What has he?", "answer": "He owes.\n#### -3"},
    {"question": "What is 1 + 1?", "answer": "#### 2"},
]
MATH500 = [
    {"problem": "Halve $1$.", "answer": r"\frac{1}{2}", "unique_id": "test/algebra/1.json"},
    {"problem": "Who?", "answer": r"\text{Evelyn}", "unique_id": "test/algebra/2.json"},
]
AIME24 = [{"id": 67, "problem": "Find $5^2$.", "answer": "025"}]
FILES = {"gsm8k_test": GSM8K, "math500_test": MATH500, "aime24_test": AIME24}


def _setting(data: Path, limit: int | None = None) -> Setting:
    return Setting(byte_tokenizer(), 1024, data, (), limit, 0)


@pytest.fixture
def data(tmp_path):
    for name, lines in FILES.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text, "utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("task", "names", "golds", "tokens"),
    [
        (Gsm8k(), ["0", "1", "2"], ["1080", "-3", "2"], 512),
        (
            Math500(),
            ["test/algebra/1.json", "test/algebra/2.json"],
            [r"\frac{1}{2}", r"\text{Evelyn}"],
            1024,
        ),
        (Aime24(), ["67"], ["025"], 2048),
    ],
)
def test_problems_are_those_of_the_file(data, task, names, golds, tokens):
    problems = list(task.problems(_setting(data)))
    assert [problem.name for problem in problems] == names
    assert [problem.expected for problem in problems] == golds
    assert {problem.max_new_tokens for problem in problems} == {tokens}
    assert all(problem.chat for problem in problems)
    assert list(task.problems(_setting(data))) == problems
    assert list(task.problems(_setting(data, 1))) == problems[:1]


def test_a_prompt_asks_for_a_box(data):
    problem = next(Math500().problems(_setting(data)))
    assert problem.prompt == (
        "Halve $1$.\nPlease reason step by step, and put your final answer within \\boxed{}."
    )


@pytest.mark.parametrize(
    ("task", "answer", "score"),
    [
        (Gsm8k(), r"She has \boxed{1080 \text{ pens}}.", 1),
        (Gsm8k(), "So she has 1,080 pens.", 1),
        (Gsm8k(), r"It is 1080, or \boxed{1000}.", 0),
        (Gsm8k(), "I cannot answer.", 0),
        (Gsm8k(), "", 0),
        (Math500(), r"\boxed{0.5}", 1),
        (Math500(), r"\boxed{\frac{1}{2", 0),
        (Aime24(), r"\boxed{25}", 1),
        (Aime24(), r"\boxed{52}", 0),
    ],
)
def test_answers_are_scored(data, task, answer, score):
    assert task.score(next(task.problems(_setting(data))), answer) == score


@pytest.mark.parametrize(
    ("task", "name", "source"),
    [
        (Gsm8k(), "gsm8k_test.jsonl", "github.com/openai/grade-school-math"),
        (Math500(), "math500_test.jsonl", "huggingface.co/datasets/HuggingFaceH4/MATH-500"),
        (Aime24(), "aime24_test.jsonl", "huggingface.co/datasets/HuggingFaceH4/aime_2024"),
    ],
)
def test_a_missing_file_is_named_with_its_source(tmp_path, task, name, source):
    with pytest.raises(UserError, match=f"there is no {re.escape(name)}.*{re.escape(source)}"):
        next(task.problems(_setting(tmp_path)))
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(b'{"text": 1}\n'))
    with pytest.raises(UserError, match="line 1, has no field"):
        next(task.problems(_setting(tmp_path)))


@pytest.mark.parametrize(
    ("task", "name", "field", "count"),
    [
        (Gsm8k(), "gsm8k_test.jsonl", "answer", 1319),
        (Math500(), "math500_test.jsonl", "solution", 500),
    ],
)
def test_published_solutions_score_full_marks(task, name, field, count):
    if not (DATA / name).is_file():
        pytest.skip(f"{name} is not in {DATA}")
    solutions = [json.loads(line)[field] for line in (DATA / name).open(encoding="utf-8")]
    problems = list(task.problems(_setting(DATA)))
    assert len(problems) == len({problem.name for problem in problems}) == count
    chosen = range(0, count, 10)
    assert all(task.score(problems[i], solutions[i]) == 1 for i in chosen)
    assert sum(task.score(problems[i], solutions[i - 1]) for i in chosen) < count / 50
