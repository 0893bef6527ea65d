# ruff: noqa: RUF001 (Chinese punctuation is meant)
import itertools
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest

from jkvq import UserError
from jkvq.tasks.longbench import metrics


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("The Eiffel Tower, in Paris.", "Eiffel Tower", Fraction(2, 3)),  # 2 of 4, 2 of 2
        ("paris", "Paris", 1),
        ("It is a dog", "the cat", 0),
        ("no no no", "no", Fraction(1, 2)),  # a word counts as often as both have it
        ("no no yes", "no no", Fraction(4, 5)),
        ("York New", "New York", 1),  # in any order
        ("", "Paris", 0),
        ("?!", "Paris", 0),
        ("the", "a", 0),  # nothing is left of either
    ],
)
def test_f1_of_english(prediction, gold, score):
    assert metrics.qa_f1(prediction, gold) == pytest.approx(float(score))


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("厦门大学", "厦门大学。", 1),
        (
            "57081.86元",
            "人民币57081.86元。",
            Fraction(4, 5),
        ),  # 57081.86 | 元 of 人民币 | 57081.86 | 元
        ("57081元", "57081.86元", Fraction(1, 2)),  # a number is one word
        ("我来到北京清华大学", "清华大学", Fraction(2, 5)),  # 我 | 来到 | 北京 | 清华大学
        ("GPT", "gpt", 1),
        ("", "厦门大学。", 0),
        ("。，！", "厦门大学。", 0),
        ("。", "。", 0),
    ],
)
def test_f1_of_chinese(prediction, gold, score):
    assert metrics.qa_f1_zh(prediction, gold) == pytest.approx(float(score))


def _f(common: int, prediction: int, gold: int) -> float:
    precision, recall = common / prediction, common / gold
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("the cat sat", "the cat ran", _f(2, 3, 3)),
        ("The cat sat", "the cat ran", _f(1, 3, 3)),  # capitals count
        ("b a", "a b", _f(1, 2, 2)),  # in order
        ("a a a b", "a b", 1),  # different words only
        # The working note's example: the union over the prediction's sentences is w1 w2 w3 w5.
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", _f(4, 8, 5)),
        ("dog", "cat", 0),
        ("", "cat", 0),
        ("...", "cat", 0),
        ("cat", "", 0),
        (" \n ", "cat", 0),
    ],
)
def test_rouge(prediction, gold, score):
    assert metrics.rouge(prediction, gold) == pytest.approx(score, abs=1e-7)


def test_rouge_is_the_longest_common_subsequence():
    draw = random.Random(0)
    for _ in range(30):
        prediction = draw.sample("abcdefgh", draw.randint(1, 8))
        gold = draw.sample("abcdefgh", draw.randint(1, 8))
        common = max(
            size
            for size in range(len(gold) + 1)
            if set(itertools.combinations(gold, size))
            & set(itertools.combinations(prediction, size))
        )
        wanted = _f(common, len(prediction), len(gold)) if common else 0
        assert metrics.rouge(" ".join(prediction), " ".join(gold)) == pytest.approx(
            wanted, abs=1e-7
        )


@pytest.fixture
def shallow() -> Iterator[int]:
    """Few calls within calls, and threads that often take turns."""
    limit, interval = sys.getrecursionlimit(), sys.getswitchinterval()
    sys.setrecursionlimit(300)
    sys.setswitchinterval(1e-5)
    yield 300
    sys.setrecursionlimit(limit)
    sys.setswitchinterval(interval)


def _unlike(words: int) -> tuple[str, str]:
    """Two sentences that have their last word in common."""
    first, second = (" ".join(f"{mark}{i}" for i in range(words)) for mark in "pg")
    return f"{first} end", f"{second} end"


def test_rouge_takes_sentences_with_more_words_than_calls_fit(shallow):
    assert metrics.rouge(*_unlike(shallow)) == pytest.approx(1 / (shallow + 1), rel=1e-4)
    assert sys.getrecursionlimit() == shallow


def test_rouge_is_the_same_in_threads(shallow):
    sizes = [shallow // 2 + 10 * i for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda size: metrics.rouge(*_unlike(size)), sizes))
    assert found == pytest.approx([1 / (size + 1) for size in sizes], rel=1e-4)
    assert sys.getrecursionlimit() == shallow


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        (
            "我爱北京",
            "我来到北京清华大学",
            _f(2, 3, 4),
        ),  # 我 | 爱 | 北京, 我 | 来到 | 北京 | 清华大学
        ("清华大学", "我来到北京清华大学", _f(1, 1, 4)),
        ("清华大学。", "清华大学", _f(1, 2, 1)),  # a full stop is a word, and ends no sentence
        ("", "清华大学", 0),
    ],
)
def test_rouge_of_chinese(prediction, gold, score):
    assert metrics.rouge_zh(prediction, gold) == pytest.approx(score, abs=1e-7)


@pytest.mark.parametrize(
    ("prediction", "gold", "classes", "score"),
    [
        ("Type: Date", "Date", ["Date", "City"], 1),
        ("Date or City", "Date", ["Date", "City"], 0.5),
        ("City", "Date", ["Date", "City"], 0),
        ("date", "Date", ["Date", "City"], 0),  # capitals count
        ("", "Date", ["Date", "City"], 0),
        ("Other number", "Other number", ["number", "Other number"], 1),  # one within the other
        ("Other number", "number", ["number", "Other number"], 0.5),  # but not this way round
        # A list that loses "A" as it is walked hides "B", which is part of the gold one as well.
        ("A B C", "A B C", ["A", "B", "A B C"], 0.5),
        ("A B C", "A B C", ["A", "A B C", "B"], 1),
    ],
)
def test_classification(prediction, gold, classes, score):
    given = list(classes)
    assert metrics.classification(prediction, gold, classes) == score
    assert classes == given


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("7", "7", 1),
        ("There are 7 of 30.", "7", 0.5),
        ("17", "7", 0),
        ("7, 7 and 8", "7", 2 / 3),
        ("07", "7", 0),  # compared as text
        ("seven", "7", 0),
        ("", "7", 0),
    ],
)
def test_count(prediction, gold, score):
    assert metrics.count(prediction, gold) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("Paragraph 12", "Paragraph 12", 1),
        ("Paragraph 12", "Paragraph 1", 0),
        ("Paragraph 1", "Paragraph 12", 0),
        ("12", "Paragraph 12", 1),
        ("Paragraph 1 or Paragraph 12", "Paragraph 12", 0.5),
        ("Paragraph 1", "Paragraph 12, not Paragraph 1", 0),  # the first is the gold one
        ("Paragraph twelve", "Paragraph 12", 0),
        ("", "Paragraph 12", 0),
    ],
)
def test_retrieval(prediction, gold, score):
    assert metrics.retrieval(prediction, gold) == score


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("段落27", "段落27", 1),
        ("答案是：段落2。", "段落27", 0),
        ("段落27，不是段落2", "段落27", 0.5),
        ("27", "段落27", 1),
        ("段落2", "段落27，不是段落2", 0),
        ("段落二十七", "段落27", 0),
        ("", "段落27", 0),
    ],
)
def test_retrieval_in_chinese(prediction, gold, score):
    assert metrics.retrieval_zh(prediction, gold) == score


@pytest.mark.parametrize(
    ("prediction", "line"),
    [
        ("x = 1\ny = 2", "x = 1"),
        ("\n\nx = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1"),
        ("# first\n// second\nx = 1", "x = 1"),
        ("url = 'http://a'\nx = 1", "x = 1"),  # // is a comment wherever it stands
        ("x = 1  # one\ny = 2", "y = 2"),
        ("```python\n\nx = 1", ""),  # an empty line is a line
        ("# nothing but a comment", ""),
        ("", ""),
    ],
)
def test_code_is_its_first_line_without_marks(prediction, line):
    assert metrics.code_similarity(prediction, "x = 1") == metrics.code_similarity(line, "x = 1")
    assert metrics.code_similarity(prediction, line) == 1
    assert metrics.code_similarity(prediction, f"{line}~") < 1


# What fuzzywuzzy 0.18.0 gives with python-Levenshtein 0.27.5.
@pytest.mark.parametrize(
    ("prediction", "gold", "per_cent"),
    [
        ("cadb", "abc", 57),  # difflib would say 29
        ("A L I E N S", "A S A L", 44),  # and 33 here
        ("tide", "diet", 50),
        ("    return self.x", "return self.y", 80),
        ("for i in range(10):", "for j in range(n):", 86),
        ("日本語", "日本", 80),
        ("x = 1", "x = 1", 100),
        ("", "x = 1", 0),
        ("", "", 100),
    ],
)
def test_code_similarity_is_fuzzywuzzys(prediction, gold, per_cent):
    assert metrics.code_similarity(prediction, gold) == per_cent / 100


# Of two texts of so many characters with so many in common; all lie between two per cents, and
# these are fuzzywuzzy's as well: a half goes to the even number, as floats have it.
@pytest.mark.parametrize(
    ("length", "common", "per_cent"),
    [
        *((8, 1, 12), (8, 3, 38), (8, 5, 62), (40, 17, 43), (40, 3, 7), (40, 1, 3), (40, 33, 82)),
        (40, 23, 57),
    ],
)
def test_halves_of_a_per_cent_round_as_fuzzywuzzys(length, common, per_cent):
    pair = ("x" * common + mark * (length - common) for mark in "yz")
    assert metrics.code_similarity(*pair) == per_cent / 100


def test_code_similarity_is_of_insertions_and_deletions():
    draw = random.Random(0)
    for _ in range(300):
        left, right = ("".join(draw.choices("ab(=", k=draw.randint(1, 14))) for _ in range(2))
        exact = Fraction(200 * _common(left, right), len(left) + len(right))
        got = round(100 * metrics.code_similarity(left, right))
        assert abs(exact - got) <= Fraction(1, 2)


def _common(left: str, right: str) -> int:
    """Characters of the longest common subsequence."""
    row = [0] * (len(right) + 1)
    for one in left:
        above = row[:]
        for at, other in enumerate(right, 1):
            row[at] = above[at - 1] + 1 if one == other else max(above[at], row[at - 1])
    return row[-1]


@pytest.mark.parametrize("name", ["jieba", "rouge", "rapidfuzz"])
def test_a_package_that_is_not_there_is_named(monkeypatch, name):
    metrics.check_packages()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"the package {name}.*pip install 'jkvq\[eval\]'"):
        metrics.check_packages()
