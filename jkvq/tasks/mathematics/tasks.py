r"""Mathematics in words: GSM8K, MATH500 and AIME 2024, each answer in a box at the end.

The prompt is the one that Qwen3 and DeepSeek-R1 ask for in their model cards. OSCAR and SAW-INT4
measure such models without printing a prompt. It holds no example. A text is right if math-verify
finds its last \boxed{...} equal to the published answer.
"""

from collections.abc import Iterator
from itertools import islice

from jkvq.tasks.files import read_lines
from jkvq.tasks.mathematics.answers import equal, given_answer
from jkvq.tasks.task import Problem, Setting

_REQUEST = "\nPlease reason step by step, and put your final answer within \\boxed{}."


class _Mathematics:
    """Scores the answer that a text gives against the published one."""

    def score(self, problem: Problem, answer: str) -> float:
        return float(equal(given_answer(answer), problem.expected))


class Gsm8k(_Mathematics):
    """Word problems of grade school; the published answers stand behind their solutions."""

    about = "GSM8K: 1,319 word problems of grade school"

    def problems(self, setting: Setting) -> Iterator[Problem]:
        source = "github.com/openai/grade-school-math (grade_school_math/data/test.jsonl)"
        lines = read_lines(setting.data, "gsm8k_test.jsonl", source, ("question", "answer"))
        for number, line in enumerate(islice(lines, setting.limit)):
            gold = line["answer"].rpartition("####")[2].strip().replace(",", "")
            yield Problem(str(number), line["question"] + _REQUEST, gold, 512)


class Math500(_Mathematics):
    """Problems of mathematical competitions: 500 of MATH's test set, chosen by OpenAI."""

    about = "MATH500: 500 problems of competitions, from algebra to number theory"

    def problems(self, setting: Setting) -> Iterator[Problem]:
        source = "huggingface.co/datasets/HuggingFaceH4/MATH-500 (test.jsonl)"
        fields = ("problem", "answer", "unique_id")
        lines = read_lines(setting.data, "math500_test.jsonl", source, fields)
        for line in islice(lines, setting.limit):
            yield Problem(line["unique_id"], line["problem"] + _REQUEST, line["answer"], 1024)


class Aime24(_Mathematics):
    """Both exams of the American Invitational Mathematics Examination of 2024."""

    about = "AIME 2024: 30 hard problems, whose answers are whole numbers from 0 to 999"

    def problems(self, setting: Setting) -> Iterator[Problem]:
        source = "huggingface.co/datasets/HuggingFaceH4/aime_2024 (as JSON lines)"
        lines = read_lines(setting.data, "aime24_test.jsonl", source, ("id", "problem", "answer"))
        for line in islice(lines, setting.limit):
            name, gold = str(line["id"]), str(line["answer"])
            yield Problem(name, line["problem"] + _REQUEST, gold, 2048)
