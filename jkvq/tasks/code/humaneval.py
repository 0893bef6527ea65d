"""HumanEval: functions to write from their signature and description, run against hidden tests.

As in lm-evaluation-harness 0.4.13: `humaneval_instruct` for models with a chat template, which are
given the beginning of their answer, and `humaneval`, plain completion, for others. Prompts, stop
strings and lengths are the harness's. So is the program that is run, with one addition: if what it
takes from an answer is no Python, a block of code in the answer that defines the function is run.
"""

import ast
import re
from collections.abc import Iterator
from itertools import islice

from jkvq.tasks.code.sandbox import passes
from jkvq.tasks.files import read_lines
from jkvq.tasks.task import Problem, Setting

_REQUEST = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{}\n```\n"
)
_ANSWER_START = "Here is the completed function:\n```python\n{}\n"
_STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
_BLOCK = re.compile(r"```[\w+]*\n(.*?)(?:```|\Z)", re.DOTALL)


class HumanEval:
    """Counts an answer if its program passes the tests, so that a mean of scores is pass@1."""

    about = "HumanEval: 164 functions in Python, run against their tests"

    def problems(self, setting: Setting) -> Iterator[Problem]:
        source = "github.com/openai/human-eval (data/HumanEval.jsonl.gz)"
        fields = ("task_id", "prompt", "entry_point", "test")
        lines = read_lines(setting.data, "HumanEval.jsonl", source, fields)
        for line in islice(lines, setting.limit):
            code, can_chat = line["prompt"], setting.tokenizer.can_chat
            yield Problem(
                name=line["task_id"],
                prompt=_REQUEST.format(code) if can_chat else code,
                expected={"code": code, "test": line["test"], "entry_point": line["entry_point"]},
                max_new_tokens=1024,
                chat=can_chat,
                answer_start=_ANSWER_START.format(code) if can_chat else "",
                stop=_STOP,
            )

    def score(self, problem: Problem, answer: str) -> float:
        test, name = problem.expected["test"], problem.expected["entry_point"]
        program = program_of(answer, problem.expected["code"], name)
        return float(passes(program, f"{test}\ncheck({name})"))


def program_of(answer: str, code: str, name: str) -> str:
    """The program to run: the given code, and behind it the answer up to its first fence.

    Args:
        answer: the rest of the function; or all of it, which then takes the place of the given one.
        code: what the model was given: imports, helpers, the signature and the description.
        name: of the function.
    """
    completed = code + answer.partition("```")[0]
    blocks = [block for block in _BLOCK.findall(answer) if f"def {name}(" in block]
    if blocks and (completed.strip() == code.strip() or not _is_python(completed)):
        return f"{code}\n{blocks[0]}"
    return completed


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
