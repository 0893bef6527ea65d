"""Multi-round co-reference (MRCR): which of several pieces of writing, asked for in the same words?

As OpenAI's MRCR, after Michelangelo (Vodrahalli et al., 2024): a long conversation in which a user
asks for pieces of writing, and at the end for the i-th answer to a request that came 2, 4 or 8
times. The last question and the score are OpenAI's; the pieces here are short, and made by a seed.
"""

import difflib
import itertools
import random
import string
from collections.abc import Iterator

from jkvq.models.tokenizer import Tokenizer
from jkvq.tasks.ruler.fitting import Draft, Draw, fitted_problems
from jkvq.tasks.task import Problem, Setting

_NEEDLES = (2, 4, 8)
_SENTENCES = 4  # of a piece
_TOPICS = 6  # of a conversation: each comes back in every form

# How a piece of each form begins; a poem and a song have a line for each sentence.
_FORMS = {
    "poem": "Sing, {adjective} {topic}, of the {place}!",
    "song": "Hey {person}, do you hear the {adjective} {topic}?",
    "riddle": "What do {person} and the {adjective} {topic} have in common?",
    "speech": "Dear friends, {person} once told me that {topic} are {adjective}.",
    "short story": "Once, near the {place}, {person} met {number} {topic}.",
    "blog post": "This week I want to tell you about {topic} and the {place}.",
    "news article": "Reporters at the {place} have seen {number} {adjective} {topic}.",
    "email": "Dear {person}, I am writing to you about the {adjective} {topic}.",
    "essay": "Few people think of {topic} when they think of the {place}.",
    "social media post": "Just saw {number} {adjective} {topic} by the {place}!",
}
_LINED = ("poem", "song")
_BODY = (
    "{person} says that the {topic} {verb} {time}.",
    "{time}, {number} of the {topic} {verb} behind the {place}.",
    "Nobody at the {place} knows why the {adjective} {topic} {verb}.",
    "It takes {number} years to learn how {topic} {verb}.",
    "The {place} is {adjective} {time}, and so are the {topic}.",
    "Ask {person} about the {number} {topic} of the {place}.",
    "Some {topic} {verb}, but the {adjective} ones never do {time}.",
    "{person} painted {topic} on the walls of the {place}.",
    "Without {topic}, the {place} would be {adjective} {time}.",
    "All {number} {topic} {verb} when {person} walks by.",
)
_WORDS = {
    "topic": (
        *("penguins", "tapirs", "rocks", "lanterns", "rivers", "violins", "bridges", "apples"),
        *("clocks", "kites", "trains", "owls", "candles", "maps", "whales", "gardens", "mirrors"),
        *("bicycles", "storms", "teapots", "ladders", "foxes", "islands", "pianos", "shoes"),
        *("windmills", "letters", "horses", "pumpkins", "comets"),
    ),
    "adjective": (
        *("quiet", "silver", "gentle", "curious", "weary", "bright", "stubborn", "hollow"),
        *("patient", "crooked", "golden", "nervous", "ancient", "cheerful", "pale", "restless"),
    ),
    "place": (
        *("harbour", "library", "old mill", "railway station", "market square", "lighthouse"),
        *("orchard", "town hall", "frozen lake", "bakery", "northern gate", "museum", "valley"),
        *("post office", "theatre", "quarry"),
    ),
    "person": (
        *("Marta", "Oskar", "Ines", "Tobias", "Leila", "Anders", "Chiara", "Pavel", "Noor", "Ruth"),
        *("Emil", "Sofia", "Hugo", "Amara", "Felix", "Yuki"),
    ),
    "number": (
        *("two", "three", "five", "seven", "nine", "eleven", "twelve", "fifteen", "twenty"),
        *("thirty", "forty", "sixty", "ninety"),
    ),
    "verb": (
        *("sleep", "gather", "vanish", "whisper", "wait", "tremble", "return", "shine", "argue"),
        *("dance", "hide", "grow", "fall silent", "lose their way", "change colour"),
    ),
    "time": (
        *("at dawn", "in winter", "after the rain", "every Tuesday", "before supper", "at noon"),
        *("in the spring", "once a year", "during the night", "when the bells ring", "in August"),
        *("on market days", "at low tide", "after the harvest"),
    ),
}
_EXAMPLE = (
    "Here is an example of a conversation succeeded by a follow-up question answered correctly:\n\n"
    "======EXAMPLE======\n{turns}\n\nUser: {question}\nAssistant: {answer}\n"
    "======END EXAMPLE======\n\n"
)

_Request = tuple[str, str]  # form and topic
_Turn = tuple[_Request, list[str]]  # a request, and the sentences of the answer


class Mrcr:
    """Problems at every length of a setting, with 2, 4 and 8 pieces to tell apart."""

    about = "MRCR: the i-th of several pieces of writing, in a conversation of any length"

    def problems(self, setting: Setting) -> Iterator[Problem]:
        kinds = {f"{needles}needle": _draw(needles, setting.tokenizer) for needles in _NEEDLES}
        return fitted_problems(kinds, setting)

    def score(self, problem: Problem, answer: str) -> float:
        """How alike the answer and the piece are; 0 without the string that was to be prepended.

        White space before the answer does not count.
        """
        prefix, answer = problem.expected["prefix"], answer.lstrip()
        if not answer.startswith(prefix):
            return 0.0
        given, piece = (x.removeprefix(prefix) for x in (answer, problem.expected["answer"]))
        return difflib.SequenceMatcher(None, given, piece).ratio()


def _draw(needles: int, tokenizer: Tokenizer) -> Draw:
    def draw(chance: random.Random, length: int) -> Draft:
        *topics, other = chance.sample(_WORDS["topic"], _TOPICS + 1)
        example = _example(other, chance)
        asked = chance.choice(list(_FORMS)), topics[0]
        seen: set[str] = set()
        wanted = [(asked, _piece(asked, chance, seen)) for _ in range(needles)]
        requests = [pair for pair in itertools.product(_FORMS, topics) if pair != asked]
        which, prefix, places = chance.randrange(needles), _prefix(chance), chance.getrandbits(64)
        others: list[_Turn] = []

        def write(sentences: int) -> str:
            count, rest = divmod(sentences, _SENTENCES)
            while len(others) <= count:
                request = chance.choice(requests)
                others.append((request, _piece(request, chance, seen)))
            request, piece = others[count]
            turns = others[:count] + ([(request, piece[:rest])] if rest else [])
            spread = random.Random(places).sample(range(len(turns) + needles), needles)
            for place, turn in zip(sorted(spread), wanted, strict=True):
                turns.insert(place, turn)
            return f"{example}{_text(turns)}\n\nUser: {_question(prefix, which, asked)}"

        answer = prefix + _joined(*wanted[which])
        return Draft(
            write,
            least=needles * _SENTENCES,
            whole=_SENTENCES,
            max_new_tokens=2 * len(tokenizer.encode(answer)),
            expected={"prefix": prefix, "answer": answer},
            answer_start="" if tokenizer.can_chat else "\nAssistant:",
            stop=("\nUser:",),
        )

    return draw


def _example(topic: str, chance: random.Random) -> str:
    """A short conversation with the right answer, on a topic that the long one does not have."""
    asked, other = ((form, topic) for form in chance.sample(list(_FORMS), 2))
    seen: set[str] = set()
    turns = [(request, _piece(request, chance, seen)) for request in (asked, other, asked)]
    prefix, which = _prefix(chance), chance.randrange(2)
    return _EXAMPLE.format(
        turns=_text(turns),
        question=_question(prefix, which, asked),
        answer=prefix + _joined(*turns[2 * which]),
    )


def _piece(request: _Request, chance: random.Random, seen: set[str]) -> list[str]:
    """Sentences of a piece of writing, unlike any that was seen."""
    form, topic = request
    while True:
        templates = [_FORMS[form], *chance.sample(_BODY, _SENTENCES - 1)]
        sentences = []
        for template in templates:
            words = {slot: chance.choice(choices) for slot, choices in _WORDS.items()}
            sentence = template.format_map(words | {"topic": topic})
            sentences.append(sentence[0].upper() + sentence[1:])
        text = _joined(request, sentences)
        if text not in seen:
            seen.add(text)
            return sentences


def _joined(request: _Request, sentences: list[str]) -> str:
    return ("\n" if request[0] in _LINED else " ").join(sentences)


def _text(turns: list[_Turn]) -> str:
    return "\n\n".join(
        f"User: write {'an' if request[0][0] in 'aeiou' else 'a'} {' about '.join(request)}\n"
        f"Assistant: {_joined(request, sentences)}"
        for request, sentences in turns
    )


def _question(prefix: str, which: int, asked: _Request) -> str:
    ordinal = ("1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th")[which]
    return (
        f"Prepend {prefix} to the {ordinal} (1 indexed) {' about '.join(asked)}. "
        "Do not include any other text in your response."
    )


def _prefix(chance: random.Random) -> str:
    return "".join(chance.choices(string.ascii_letters + string.digits, k=10))
