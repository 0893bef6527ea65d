"""LongBench's metrics: what a prediction is worth against one gold answer, from 0 to 1.

They are the authors', with what is odd in them, so that scores compare with published ones.
"""

import contextlib
import importlib
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jkvq.support.errors import UserError
from jkvq.tasks.longbench.normalize import normalized_chinese, normalized_english

_PACKAGES = ("jieba", "rouge", "rapidfuzz")
_CALL_DEPTH = threading.Lock()


def check_packages() -> None:
    """Refuse to begin what could not be scored."""
    for name in _PACKAGES:
        _package(name)


def qa_f1(prediction: str, gold: str) -> float:
    """F1 of the words that both have, each as often as both have it."""
    return _f1(normalized_english(prediction).split(), normalized_english(gold).split())


def qa_f1_zh(prediction: str, gold: str) -> float:
    """F1 of the Chinese words that both have."""

    def words(text: str) -> list[str]:
        return [word for word in map(normalized_chinese, _chinese_words(text)) if word]

    return _f1(words(prediction), words(gold))


def rouge(prediction: str, gold: str) -> float:
    """ROUGE-L's F over different words, sentence by sentence; 0 where a text has no sentence."""
    scorer = _package("rouge").Rouge(metrics=["rouge-l"], stats=["f"])
    with _deeper_calls(len(prediction.split()) + len(gold.split())):
        try:
            return scorer.get_scores(prediction, gold)[0]["rouge-l"]["f"]
        except ValueError:
            return 0.0


def rouge_zh(prediction: str, gold: str) -> float:
    """ROUGE-L's F over Chinese words."""
    return rouge(" ".join(_chinese_words(prediction)), " ".join(_chinese_words(gold)))


def classification(prediction: str, gold: str, classes: list[str]) -> float:
    """One part of as many as there are classes in the prediction, if the gold one is among them.

    A class whose name is part of the gold one's does not count.
    """
    found = [name for name in classes if name in prediction]
    # The authors shorten the list they walk: the class right after one left out stays.
    for name in found:
        if name in gold and name != gold:
            found.remove(name)
    return 1 / len(found) if gold in found else 0.0


def count(prediction: str, gold: str) -> float:
    """The part of the prediction's numbers that are the gold one."""
    return _part_of_numbers(prediction, [gold])


def retrieval(prediction: str, gold: str) -> float:
    """The part of the prediction's numbers that are the gold paragraph's."""
    return _part_of_numbers(prediction, re.findall(r"Paragraph (\d+)", gold)[:1])


def retrieval_zh(prediction: str, gold: str) -> float:
    """The part of the prediction's numbers that are the gold paragraph's, in Chinese."""
    return _part_of_numbers(prediction, re.findall(r"段落(\d+)", gold)[:1])


def code_similarity(prediction: str, gold: str) -> float:
    """Likeness, in whole per cents, of the first line without a comment or a Markdown mark.

    It is fuzzywuzzy's with python-Levenshtein, of insertions and deletions; without that package
    fuzzywuzzy takes difflib's, which is another.
    """
    lines = prediction.lstrip("\n").split("\n")
    code = (line for line in lines if not any(mark in line for mark in ("`", "#", "//")))
    return round(_package("rapidfuzz.fuzz").ratio(next(code, ""), gold)) / 100


def _f1(prediction: list[str], gold: list[str]) -> float:
    same = (Counter(prediction) & Counter(gold)).total()
    if same == 0:
        return 0.0
    precision, recall = same / len(prediction), same / len(gold)
    return 2 * precision * recall / (precision + recall)


def _part_of_numbers(prediction: str, wanted: list[str]) -> float:
    numbers = re.findall(r"\d+", prediction)
    return sum(number in wanted for number in numbers) / len(numbers) if numbers else 0.0


def _chinese_words(text: str) -> list[str]:
    jieba = _package("jieba")
    jieba.setLogLevel("WARNING")  # else it tells on stderr that it reads its dictionary
    return list(jieba.cut(text))


@contextlib.contextmanager
def _deeper_calls(more: int) -> Iterator[None]:
    """Room for the calls of the package rouge, one within the other for each word.

    Without it a long answer's score would hang on how deep the caller is. All threads have one
    limit, so one at a time may change it.
    """
    with _CALL_DEPTH:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(limit + more)
        try:
            yield
        finally:
            sys.setrecursionlimit(limit)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"LongBench is scored with the package {error.name}, which is not installed: "
            "pip install 'jkvq[eval]'"
        ) from None
