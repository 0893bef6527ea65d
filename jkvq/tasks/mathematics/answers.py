"""Which answer a text gives to a problem of mathematics, and whether two answers are equal.

Run as a program, it compares pairs of answers that come in as lines of JSON.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading

from jkvq.support.errors import UserError

_CPU_SECONDS = 3  # that a comparison may take
_MEMORY = 4 << 30  # bytes that a comparison may take

_BOX = re.compile(r"\\boxed\s*(?=\{)")
_NUMBER = re.compile(
    r"(?:(?<![\w)])-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?|-?\.\d+"
)
_FORMULA = re.compile(r"\\\((.+?)\\\)|\\\[(.+?)\\\]|\$([^$]*[\\^=][^$]*)\$")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3}")  # and no command of LaTeX
_UNIT = re.compile(r"(\\?\$?-?[\d.,]*\d)\s+[A-Za-z]{3}[A-Za-z ]*")


def given_answer(text: str) -> str:
    r"""The answer that a text gives; empty where it gives none.

    That is what the last \boxed{...} holds; else what follows the last "####" or "answer is"; else
    the last number. A text that is cut off inside its last box gives no answer.
    """
    if boxes := list(_BOX.finditer(text)):
        return _inside_braces(text[boxes[-1].end() :])
    said = re.split(r"####|answer is:?", text, flags=re.IGNORECASE)
    if len(said) > 1 and said[-1].strip():
        return _stated(said[-1].strip().splitlines()[0])
    return _number(text, last=True)


def _inside_braces(text: str) -> str:
    """What stands between the brace that a text begins with and the one that closes it."""
    depth = 0
    for mark in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(mark.group(), 0)
        if depth == 0:
            return text[1 : mark.start()].strip()
    return ""


def _stated(line: str) -> str:
    """The answer in the rest of a sentence such as "the answer is 18 dollars."."""
    line = line.replace("**", "").strip(" .")
    if formula := _FORMULA.search(line):
        return next(filter(None, formula.groups())).strip()
    return (_number(line) if _WORD.search(line) else "") or line


def _number(text: str, *, last: bool = False) -> str:
    found = _NUMBER.findall(text)
    return found[-1 if last else 0].replace("$", "") if found else ""


def equal(answer: str, gold: str) -> bool:
    """Whether an answer is the right one: as a number, an expression, a set, a matrix or a word.

    Hugging Face's math-verify decides. It may be called from any thread, and an answer that is too
    hard to compare within seconds is not equal.
    """
    answer, gold = _plain(answer), _plain(gold)
    if not answer or not gold:
        return False
    return answer == gold or _comparer.equal(answer, gold)


def _plain(answer: str) -> str:
    """An answer without what only speech needs: "18 dollars." is 18."""
    answer = answer.strip().rstrip(".").strip()
    if text := re.fullmatch(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*\d[^{}]*)\}", answer):
        answer = text.group(1).strip()
    unit = _UNIT.fullmatch(answer)
    return unit.group(1) if unit else answer


class _Comparer:
    """A process that compares, one pair at a time, and that another takes the place of if it ends.

    It ends by itself on a comparison that takes too long: nothing inside Python could stop one that
    computes a power of a million digits.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def equal(self, answer: str, gold: str) -> bool:
        with self._lock:
            process = self._process or _started()
            self._process = None  # until its reply is here, so that none is taken for another's
            said = _told(process, json.dumps([answer, gold]))
            if said:
                self._process = process
            else:
                process.kill()
                process.wait()
            return said == "true\n"


_comparer = _Comparer()


def _started() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(_CPU_SECONDS)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    if _told(process, "") != "ready\n":
        process.wait()
        raise UserError(
            "answers are compared with math-verify, which cannot be imported: "
            "pip install 'jkvq[eval]'"
        )
    return process


def _told(process: subprocess.Popen[str], line: str) -> str:
    """The line that a process replies to a line; empty if it ended."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line + "\n")
        process.stdin.flush()
    return process.stdout.readline()


def _compare_lines(cpu_seconds: float) -> None:
    """Replies true or false to each pair of an answer and the right one, until there are no more.

    The first line that comes in is empty; the reply says that all is ready.
    """
    import logging  # noqa: PLC0415 (only in this process)
    import resource  # noqa: PLC0415 (not on Windows)

    from math_verify import parse, verify  # noqa: PLC0415 (optional, and only in this process)

    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        reply = "ready"
        if line.strip():
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # its signal ends the process
            answer, gold = (parse(f"${it}$", parsing_timeout=0) for it in json.loads(line))
            reply = json.dumps(bool(verify(gold, answer, timeout_seconds=0)))
            signal.setitimer(signal.ITIMER_PROF, 0)
        print(reply, file=replies, flush=True)


if __name__ == "__main__":
    _compare_lines(float(sys.argv[1]))
