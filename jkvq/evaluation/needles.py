"""Needles in a haystack: facts hidden in a long text, asked for through the cache.

The six tasks of Block-GTQ's appendix D.1. A needle says that a city's magic number is some number;
the haystack is prose, cut at a sentence for each needle. Needles are the same for every cache.
"""

import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jkvq.engine.generate import generate
from jkvq.engine.options import Options
from jkvq.llm import LLM
from jkvq.models.tokenizer import Tokenizer
from jkvq.support.errors import UserError, nearest
from jkvq.support.progress import count_bar

_CITIES = (
    *("Paris", "Tokyo", "Cairo", "Lima", "Oslo", "Nairobi", "Quito", "Hanoi", "Dublin", "Havana"),
    *("Athens", "Bogota", "Prague", "Manila", "Vienna", "Riga"),
)
_ANSWER = 24  # tokens that an answer may take for each number it must hold

_BATCH = 4  # prompts at a time


@dataclass(frozen=True)
class Task:
    """What is hidden and what is asked.

    needles: facts in the haystack; the first is at the depth under test, and the others are spread
        evenly from there, round the end, or right behind it if ``together``.
    asked: how many of them are asked for, one question each.
    values: numbers that belong to a city; a question asks for all of them.
    distractors: sentences of the same form about other cities' phone numbers.
    """

    about: str
    needles: int = 1
    asked: int = 1
    values: int = 1
    distractors: int = 0
    together: bool = False


TASKS = {
    "single": Task("one needle"),
    "distract": Task("one needle among four sentences of its form", distractors=4),
    "multi": Task("four needles, one asked for", needles=4),
    "multi-key": Task("three needles side by side, each asked for", 3, 3, together=True),
    "multi-value": Task("three numbers of one city, all asked for", values=3),
    "multi-query": Task("four needles, each asked for", 4, 4),
}


@dataclass(frozen=True)
class Question:
    """A prompt, the beginning of its answer, and the numbers that the answer must hold."""

    prompt: str
    answer_start: str
    expected: tuple[str, ...]


def score(expected: Sequence[str], answer: str) -> float:
    """The part of the numbers that an answer holds."""
    found = set(re.findall(r"\d+", answer))
    return sum(number in found for number in expected) / len(expected)


# Texts that answer questions, of at most so many tokens each.
Answer = Callable[[LLM, list[Question], int], list[str]]


@dataclass(frozen=True)
class Cell:
    """The mean score of a task at one length and depth."""

    task: str
    length: int
    depth: float
    score: float


def read_haystack(path: Path) -> str:
    """The text of a file, or of all .txt files of a folder, in the order of their names."""
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise UserError(f"{path} is no text file and no folder with .txt files")
    try:
        return "\n\n".join(file.read_text("utf-8") for file in files)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text: {error}") from None


def questions(
    task: Task, tokenizer: Tokenizer, haystack: str, length: int, depth: float, trial: int
) -> list[Question]:
    """The questions of one trial: prompts of at most ``length`` tokens, and close to it."""
    cities, numbers, filler = _drawn(haystack, trial)
    facts = [
        (next(cities), tuple(next(numbers) for _ in range(task.values)))
        for _ in range(task.needles)
    ]
    needles = [f"The magic number of {city} is {n}." for city, values in facts for n in values]
    others = [
        f"The phone number of {next(cities)} is {next(numbers)}." for _ in range(task.distractors)
    ]
    groups = [" ".join(needles)] if task.together else needles + others

    def prompt(city: str, sentences: list[str]) -> str:
        asked = "is the magic number" if task.values == 1 else "are all the magic numbers"
        return f"{_hide(sentences, groups, depth)}\n\nWhat {asked} of {city}? Answer with digits."

    answer_start = "" if tokenizer.can_chat else "\nAnswer:"

    def size(city: str, sentences: list[str]) -> int:
        return len(tokenizer.encode_question(prompt(city, sentences), answer_start))

    longest = max((city for city, _ in facts), key=lambda city: size(city, []))
    sentences = _fitting(filler, lambda some: size(longest, some), length)
    return [
        Question(prompt(city, sentences), answer_start, values)
        for city, values in facts[: task.asked]
    ]


def _hide(sentences: list[str], needles: list[str], depth: float) -> str:
    """The text with the first needle at ``depth`` and the others spread evenly from there."""
    places: dict[int, list[str]] = {}
    for index, needle in enumerate(needles):
        place = (depth + index / len(needles)) % 1 if index else depth
        places.setdefault(round(place * len(sentences)), []).append(needle)
    parts: list[str] = []
    for index, sentence in enumerate([*sentences, ""]):
        parts += [*places.get(index, []), sentence]
    return " ".join(parts).strip()


def _drawn(haystack: str, trial: int) -> tuple[Iterator[str], Iterator[str], list[str]]:
    """Cities, numbers without repetition, and the sentences from a random one on, of a trial."""
    draw = random.Random(trial)
    cities = draw.sample(_CITIES, len(_CITIES))
    numbers = [str(number) for number in draw.sample(range(10_000, 100_000), 64)]
    sentences = [part for part in re.split(r"(?<=[.!?])\s+", haystack) if part]
    start = draw.randrange(len(sentences))
    return iter(cities), iter(numbers), sentences[start:] + sentences[:start]


def _fitting(sentences: list[str], size: Callable[[list[str]], int], length: int) -> list[str]:
    """The most sentences, from the first on, that keep a prompt within ``length`` tokens."""
    if size([]) > length:
        raise UserError(
            f"length={length}: the question alone takes {size([])} tokens; give more room"
        )
    low, high = 0, 1
    while size(sentences[:high]) <= length:
        if high >= len(sentences):
            raise UserError(
                f"length={length}: the haystack has too little text to fill so many tokens; give "
                "more"
            )
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(sentences[:middle]) <= length else (low, middle)
    return sentences[:low]


def niah(
    llms: Mapping[str, LLM],
    haystack: str,
    *,
    tasks: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int = 3,
    answer: Answer | None = None,
) -> dict[str, list[Cell]]:
    """Scores each model and cache on every task, length and depth, over so many haystacks.

    Args:
        llms: by name; all of one model.
        haystack: prose to hide needles in.
        tasks: names of `TASKS`.
        lengths: tokens of a prompt.
        depths: where the first needle lies, from 0 to 1.
        trials: haystacks and needles for each cell.
        answer: what answers prompts; None is the model, greedily.
    """
    _check(next(iter(llms.values())), tasks, lengths, depths, trials)
    answer = answer or _generated
    cells: dict[str, list[Cell]] = {name: [] for name in llms}
    grid = list(itertools.product(tasks, lengths, depths))
    with count_bar("Searching", len(grid) * len(llms)) as bar:
        for task, length, depth in grid:
            tokenizer = next(iter(llms.values())).tokenizer
            asked = [
                question
                for trial in range(trials)
                for question in questions(TASKS[task], tokenizer, haystack, length, depth, trial)
            ]
            budget = answer_tokens(TASKS[task])
            for name, llm in llms.items():
                scores = []
                for batch in (asked[i : i + _BATCH] for i in range(0, len(asked), _BATCH)):
                    answers = answer(llm, batch, budget)
                    pairs = zip(batch, answers, strict=True)
                    scores += [score(question.expected, text) for question, text in pairs]
                cells[name].append(Cell(task, length, depth, sum(scores) / len(scores)))
                bar.advance(1)
    return cells


def _check(llm: LLM, tasks, lengths, depths, trials: int) -> None:
    for task in tasks:
        if task not in TASKS:
            raise UserError(f"task '{task}' is not known: {nearest(task, TASKS)}")
    room = llm.config.context - max(answer_tokens(TASKS[task]) for task in tasks)
    for length in lengths:
        if not 1 <= length <= room:
            raise UserError(f"length={length}: with room for an answer, 1 to {room} tokens fit")
    for depth in depths:
        if not 0 <= depth <= 1:
            raise UserError(f"depth={depth:.0%}: from 0% to 100%")
    if trials < 1:
        raise UserError(f"trials={trials}: at least 1 is needed")


def answer_tokens(task: Task) -> int:
    """Tokens of the longest answer."""
    return _ANSWER * task.values


def _generated(llm: LLM, asked: list[Question], budget: int) -> list[str]:
    options = [Options(budget, answer_start=question.answer_start) for question in asked]
    found = generate(llm, [question.prompt for question in asked], options)
    return [generation.text for generation in found]
