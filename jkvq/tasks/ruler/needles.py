"""RULER's needles in a haystack (niah): values of keys, in noise, essays or other needles."""

import itertools
import random
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from jkvq.tasks.ruler.fitting import Draft
from jkvq.tasks.ruler.words import english

NOISE = (
    *("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go."),
    "There and back again.",
)
_NEEDLE = "One of the special magic {type} for {key} is: {value}."
_PROMPT = (
    "Some special magic {type} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {type} afterwards.\n{context}\n"
    "What are all the special magic {type} for {query} mentioned in the provided text?"
)
_ANSWER = " The special magic {type} for {query} mentioned in the provided text are"
_ANSWER_TOKENS = 128
_DEPTHS = [round(100 * i / 39) for i in range(40)]  # in percent
_PARTS = 10  # of a line, to which the last one may be cut

Type = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True)
class Needles:
    """What is hidden in what, and what is asked for.

    haystack: lines of noise, words of essays, or lines that look like needles.
    keys, values: their types.
    key_count: keys that are hidden.
    value_count: needles of each key, each with a value of its own.
    query_count: keys that are asked for, with all their values.
    """

    haystack: Literal["noise", "essay", "needle"]
    keys: Type = "words"
    values: Type = "numbers"
    key_count: int = 1
    value_count: int = 1
    query_count: int = 1

    def draw(self, chance: random.Random, essay: Sequence[str]) -> Draft:
        """A problem; ``essay`` is the words of the essays, which only some haystacks need."""
        keys, values = distinct(self.keys, chance), distinct(self.values, chance)
        facts = {
            next(keys): list(itertools.islice(values, self.value_count))
            for _ in range(self.key_count)
        }
        needles = [self._needle(key, value) for key, found in facts.items() for value in found]
        chance.shuffle(needles)
        asked = chance.sample(list(facts), self.query_count)
        prompt, answer = self._question(asked)
        places = chance.getrandbits(64)
        others = map(self._needle, keys, values)
        lines: list[str] = []

        def write(units: int) -> str:
            if self.haystack == "essay":
                text = _in_essay(needles, essay, units, random.Random(places))
            elif self.haystack == "noise":
                text = _in_lines(needles, noise(units), units // len(NOISE), random.Random(places))
            else:
                count, parts = divmod(units, _PARTS)
                lines.extend(itertools.islice(others, max(0, count + 1 - len(lines))))
                cut = [lines[count][: len(lines[count]) * parts // _PARTS]] if parts else []
                text = _in_lines(needles, lines[:count] + cut, count, random.Random(places))
            return prompt.replace("{context}", text)

        whole = {"noise": len(NOISE), "essay": 1, "needle": _PARTS}[self.haystack]
        return Draft(
            write,
            least=whole,
            whole=whole,
            max_new_tokens=_ANSWER_TOKENS,
            expected=[value for key in asked for value in facts[key]],
            answer_start=answer,
        )

    def _needle(self, key: str, value: str) -> str:
        return _NEEDLE.format(type=self.values, key=key, value=value)

    def _question(self, asked: list[str]) -> tuple[str, str]:
        """The prompt, with a place for its context, and the start of the answer."""
        texts, values = (_PROMPT, _ANSWER), str(self.values)
        if self.query_count * self.value_count == 1:
            singular = (("Some", "A"), ("are all", "is"), ("are", "is"))
            for many, one in singular:
                texts = tuple(text.replace(many, one) for text in texts)
            values = values.removesuffix("s")
        query = ", ".join(asked[:-1]) + ", and " + asked[-1] if asked[1:] else asked[0]
        prompt, answer = (
            text.format(type=values, query=query, context="{context}") for text in texts
        )
        return prompt, answer


KINDS = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", values="uuids"),
    "niah_multikey_1": Needles("essay", key_count=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("essay", value_count=4),
    "niah_multiquery": Needles("essay", key_count=4, query_count=4),
}


def noise(sentences: int) -> list[str]:
    """Lines of noise with so many sentences in all; the last may be cut short."""
    lines, rest = divmod(sentences, len(NOISE))
    return [" ".join(NOISE)] * lines + ([" ".join(NOISE[:rest])] if rest else [])


def distinct(kind: Type, chance: random.Random) -> Iterator[str]:
    """Keys or values without end, none of them twice."""
    adjectives, nouns = (english("adjective"), english("noun")) if kind == "words" else ((), ())
    seen = set()
    while True:
        if kind == "numbers":
            found = str(chance.randint(10**6, 10**7 - 1))
        elif kind == "words":
            found = f"{chance.choice(adjectives)}-{chance.choice(nouns)}"
        else:
            found = str(uuid.UUID(int=chance.getrandbits(128), version=4))
        if found not in seen:
            seen.add(found)
            yield found


def _in_lines(needles: list[str], lines: list[str], count: int, chance: random.Random) -> str:
    """The lines with each needle before one of the first ``count``."""
    lines = list(lines)
    places = sorted(chance.sample(range(count), len(needles)), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines)


def _in_essay(needles: list[str], essay: Sequence[str], words: int, chance: random.Random) -> str:
    """So many words of the essays, over and over, with a needle at each of some depths."""
    text = " ".join(itertools.islice(itertools.cycle(essay), words))
    sentences = re.split(r"(?<=[.!?])\s+", text)
    depths = sorted(chance.sample(_DEPTHS, len(needles)))
    places = [0, *(int(len(sentences) * (depth / 100)) for depth in depths), len(sentences)]
    parts = [" ".join(sentences[start:end]) for start, end in itertools.pairwise(places)]
    pairs = itertools.zip_longest(parts, needles)
    return " ".join(part for pair in pairs for part in pair if part is not None)
