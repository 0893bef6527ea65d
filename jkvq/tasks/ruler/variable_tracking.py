"""RULER's variable tracking (vt): a chain of assignments in noise, and who has its value."""

import random
import string

from jkvq.models.tokenizer import Tokenizer
from jkvq.tasks.ruler.fitting import Draft
from jkvq.tasks.ruler.needles import NOISE, noise

_PROMPT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
_ANSWER = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assgined the value {value}, they are: "
)
_ANSWER_TOKENS = 30
_HOPS = 4
_LEAST = 5 * len(NOISE)  # sentences: a line of noise for each assignment
_EXAMPLE = 500  # tokens of the worked example at most


def example_sentences(tokenizer: Tokenizer) -> int:
    """Sentences of noise in the worked example of a prompt: as many lines as 500 tokens take."""
    chance = random.Random(0)
    short, longer = (
        len(tokenizer.encode(_example(sentences, chance))) for sentences in (_LEAST, 2 * _LEAST)
    )
    lines = (_EXAMPLE - short) * _LEAST // (longer - short) // len(NOISE)
    return _LEAST + max(0, lines) * len(NOISE)


def draw(chance: random.Random, example: int) -> Draft:
    """A problem, whose worked example has so many sentences of noise."""
    names, value = _names(chance, letters=5), str(chance.randrange(10_000, 99_999))
    worked = _example(example, chance)
    places = chance.getrandbits(64)

    def write(sentences: int) -> str:
        context = _chain_in_noise(names, value, sentences, random.Random(places))
        return f"{worked}\n\n{_PROMPT.format(context=context, value=value)}"

    return Draft(
        write,
        least=_LEAST,
        whole=len(NOISE),
        max_new_tokens=_ANSWER_TOKENS,
        expected=names,
        answer_start=_ANSWER.format(count=len(names), value=value),
    )


def _example(sentences: int, chance: random.Random) -> str:
    """A problem with its answer, whose variables have shorter names."""
    names, value = _names(chance, letters=3), str(chance.randrange(10_000, 99_999))
    context = _chain_in_noise(names, value, sentences, chance)
    asked = _PROMPT.format(context=context, value=value)
    return f"{asked}{_ANSWER.format(count=len(names), value=value)} {' '.join(names)}"


def _names(chance: random.Random, letters: int) -> list[str]:
    names: dict[str, None] = {}  # an ordered set
    while len(names) < _HOPS + 1:
        names["".join(chance.choices(string.ascii_uppercase, k=letters))] = None
    return list(names)


def _chain_in_noise(names: list[str], value: str, sentences: int, chance: random.Random) -> str:
    """Noise, and in its order the chain that gives the value from each variable to the next."""
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {names[i + 1]} = VAR {names[i]} " for i in range(_HOPS)]
    lines = noise(sentences)
    places = sorted(chance.sample(range(sentences // len(NOISE)), len(chain)))
    for moved, (place, assignment) in enumerate(zip(places, chain, strict=True)):
        lines.insert(place + moved, assignment)
    return "\n".join(lines)
