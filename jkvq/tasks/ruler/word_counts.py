"""RULER's tasks of counting: common words of a list (cwe) and frequent words of a text (fwe)."""

import itertools
import math
import random
import string

from jkvq.tasks.ruler.fitting import Draft
from jkvq.tasks.ruler.needles import distinct
from jkvq.tasks.ruler.words import english

_COMMON_PROMPT = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
_COMMON_ANSWER = " Answer: The top 10 words that appear most often in the list are:"
_COMMON_TOKENS = 120
_COMMON = 10  # words that are asked for
_LONG = 4096  # tokens from which on words are repeated more often

_FREQUENT_PROMPT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text?"
)
_FREQUENT_ANSWER = (
    " Answer: According to the coded text above, the three most frequently appeared words are:"
)
_FREQUENT_TOKENS = 50
_ZETA = math.pi**2 / 6  # the sum of 1 / rank**2
_LETTERS = 6  # of a coded word
# From here on the word of rank 4, the last that is asked for, is more frequent than that of rank 5.
_FREQUENT_LEAST = math.ceil(_ZETA / (4**-2 - 5**-2))


def draw_common(chance: random.Random, length: int) -> Draft:
    """A list in which ten words come ten times as often as the others, or six in a short one.

    Where there are no more words, pairs of them follow.
    """
    if length < _LONG:
        worked, repeats = _worked_list(chance, words=20, common=3, others=1), (6, 1)
    else:
        worked, repeats = _worked_list(chance, words=40, common=10, others=3), (30, 3)
    words, pairs = chance.sample(_words(), len(_words())), distinct("words", chance)
    order = chance.getrandbits(64)

    def write(count: int) -> str:
        words.extend(itertools.islice(pairs, max(0, count - len(words))))
        listed = _word_list(words[:count], *repeats, random.Random(order))
        return f"{worked}\n{_COMMON_PROMPT.format(context=listed)}"

    return Draft(
        write,
        least=2 * _COMMON,
        max_new_tokens=_COMMON_TOKENS,
        expected=words[:_COMMON],
        answer_start=_COMMON_ANSWER,
    )


def _words() -> tuple[str, ...]:
    return english("noun", "adjective", "verb")


def _worked_list(chance: random.Random, words: int, common: int, others: int) -> str:
    """A problem with its answer."""
    chosen = chance.sample(_words(), words)
    context = _word_list(chosen, common, others, chance)
    answer = _numbered(chosen[:_COMMON])
    return f"{_COMMON_PROMPT.format(context=context)}{_COMMON_ANSWER} {answer}"


def _word_list(words: list[str], common: int, others: int, chance: random.Random) -> str:
    """The first ten words so many times and the others so many, in a random order."""
    listed = words[:_COMMON] * common + words[_COMMON:] * others
    chance.shuffle(listed)
    return _numbered(listed)


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def draw_frequent(chance: random.Random, length: int) -> Draft:
    """Coded words, as often as one over their rank squared; the first is dots, to be ignored."""
    coded: dict[str, None] = {}  # an ordered set
    while len(coded) < max(5, length // 50):
        coded["".join(chance.choices(string.ascii_lowercase, k=_LETTERS))] = None
    words = ["...", *list(coded)[1:]]
    order = chance.getrandbits(64)

    def write(count: int) -> str:
        text = [w for rank, w in enumerate(words, 1) for _ in range(int(count / rank**2 / _ZETA))]
        random.Random(order).shuffle(text)
        return _FREQUENT_PROMPT.format(context=" ".join(text))

    return Draft(
        write,
        least=_FREQUENT_LEAST,
        max_new_tokens=_FREQUENT_TOKENS,
        expected=words[1:4],
        answer_start=_FREQUENT_ANSWER,
    )
