import dataclasses
import math
import re
from collections import Counter

import pytest

from jkvq.tasks.ruler import word_counts
from jkvq.tasks.ruler.ruler import Ruler
from jkvq.tasks.task import Problem
from tests.tasks.ruler.made_up import chat_tokenizer, setting

LIST = re.compile(
    r"Below is a numbered list of words\. In these words, some appear more often than others\. "
    r"Memorize the ones that appear most often\.\n(.*?)\n"
    r"Question: What are the 10 most common words in the above list\?",
)
CODED = re.compile(
    r"Read the following coded text and track the frequency of each coded word\. Find the three "
    r"most frequently appeared coded words\. (.*)\nQuestion: Do not provide any explanation\. "
    r"Please ignore the dots '\.\.\.\.'\. What are the three most frequently appeared words in the "
    r"above coded text\?"
)


def problems(tmp_path, kind: str, length: int, limit=3) -> list[Problem]:
    return list(Ruler((kind,)).problems(setting(tmp_path, chat_tokenizer(), (length,), limit)))


def counted(text: str) -> Counter[str]:
    """How often each word of a numbered list occurs."""
    entries = re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", text)
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    return Counter(word for _, word in entries)


def check_common(problem: Problem) -> None:
    example, words = (counted(text) for text in LIST.findall(problem.prompt))
    assert len(set(problem.expected)) == 10
    assert {word for word, _ in words.most_common(10)} == set(problem.expected)
    long = int(problem.part) >= 4096
    common, others = (30, 3) if long else (6, 1)
    assert Counter(words.values()) == {common: 10, others: len(words) - 10}
    assert Counter(example.values()) == ({10: 10, 3: 30} if long else {3: 10, 1: 10})

    start = " Answer: The top 10 words that appear most often in the list are:"
    assert problem.answer_start == start
    shown = problem.prompt[problem.prompt.index(start) + len(start) :].split("\n")[0]
    assert set(counted(shown.strip())) == {word for word, _ in example.most_common(10)}


def check_frequent(problem: Problem) -> None:
    coded = CODED.fullmatch(problem.prompt)
    assert coded
    words = Counter(coded.group(1).split(" "))
    dots = words.pop("...")
    assert [word for word, _ in words.most_common(3)] == problem.expected
    assert all(re.fullmatch("[a-z]{6}", word) for word in words)
    counts = [dots, *(count for _, count in words.most_common())]
    zeta = math.pi**2 / 6
    assert any(  # some number of words, shared out by Zipf's law with an exponent of 2
        counts == [int(n / zeta / rank**2) for rank in range(1, len(counts) + 1)]
        for n in range(int(dots * zeta), int((dots + 1) * zeta) + 2)
    )


@pytest.mark.parametrize("length", [3000, 6000])
def test_common_words_are_the_expected_ones(tmp_path, length):
    found = problems(tmp_path, "cwe", length)
    for problem in found:
        check_common(problem)
        assert problem.max_new_tokens == 120
    assert len({tuple(problem.expected) for problem in found}) == len(found)


def test_lists_go_on_where_there_are_no_more_words(tmp_path, monkeypatch):
    few = tuple(f"word{chr(97 + i)}" for i in range(26)) + tuple("abcdefghijklmnop")
    english = word_counts.english
    monkeypatch.setattr(
        word_counts, "english", lambda *names: few if "verb" in names else english(*names)
    )
    for problem in problems(tmp_path, "cwe", 6000):
        check_common(problem)
        assert set(problem.expected) < set(few)


@pytest.mark.parametrize("length", [1000, 6000])
def test_frequent_words_are_the_expected_ones(tmp_path, length):
    found = problems(tmp_path, "fwe", length)
    for problem in found:
        check_frequent(problem)
        assert problem.max_new_tokens == 50
        assert problem.answer_start == (
            " Answer: According to the coded text above, the three most frequently appeared words "
            "are:"
        )
    assert len({tuple(problem.expected) for problem in found}) == len(found)


def test_the_three_frequent_words_are_no_tie():
    for count in range(word_counts._FREQUENT_LEAST, 5000):
        _, _, last, next_one = (int(count / (math.pi**2 / 6) / rank**2) for rank in range(2, 6))
        assert last > next_one


def test_wrong_counts_would_be_caught(tmp_path, monkeypatch):
    right = word_counts._word_list
    monkeypatch.setattr(
        word_counts, "_word_list", lambda words, *rest: right([*words[1:], words[0]], *rest)
    )
    with pytest.raises(AssertionError):
        check_common(problems(tmp_path, "cwe", 3000, limit=1)[0])
    [problem] = problems(tmp_path, "fwe", 3000, limit=1)
    one_less = problem.prompt.replace(f" {problem.expected[0]} ", " ", 1)
    with pytest.raises(AssertionError):
        check_frequent(dataclasses.replace(problem, prompt=one_less))
