import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkvq import UserError
from jkvq.models.tokenizer import Message, Tokenizer
from jkvq.tasks.ruler.fitting import Draft, fitted_problems
from jkvq.tasks.ruler.ruler import KINDS, Ruler
from jkvq.tasks.task import Setting
from tests.tasks.ruler.made_up import chat_tokenizer, setting, size
from tests.tiny import byte_tokenizer


@dataclass(frozen=True)
class LetterTokenizer(Tokenizer):
    """A token for each letter, and no chat template."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def letters(*lengths: int, limit=5, context=10**6) -> Setting:
    tokenizer = LetterTokenizer(byte_tokenizer().hf, frozenset())
    return Setting(tokenizer, context, Path(), lengths, limit, seed=0)


def drafts(step: int, fixed: int, bend: float = 0.0, whole: int = 1):
    """Draws prompts of about ``fixed`` letters and a step more for each unit."""

    def draw(chance: random.Random, length: int) -> Draft:
        extra = chance.randrange(fixed)

        def write(units: int) -> str:
            return "x" * (fixed + extra + int(step * units + bend * units**2))

        return Draft(write, least=max(2, whole), max_new_tokens=10, expected=extra, whole=whole)

    return draw


@given(
    st.integers(1, 40),
    st.integers(1, 500),
    st.floats(0, 0.01),
    st.sampled_from([1, 5, 10]),
    st.integers(4000, 100_000),
)
def test_prompts_fill_the_length_whatever_they_are_made_of(step, fixed, bend, whole, length):
    found = list(fitted_problems({"a": drafts(step, fixed, bend, whole)}, letters(length)))
    assert len(found) == 5
    for problem in found:
        assert 0.98 * length <= len(problem.prompt) + 10 <= length


def test_units_that_belong_together_stay_together_where_that_fits():
    long, short = (
        [
            (len(problem.prompt) - 100 - problem.expected) // 4 % 10
            for problem in fitted_problems({"a": drafts(4, 100, whole=10)}, letters(length))
        ]
        for length in (5000, 700)
    )
    assert set(long) == {0}
    assert set(short) != {0}


@dataclass(frozen=True)
class CountingTokenizer(Tokenizer):
    """Keeps the number of characters of all that it encodes."""

    seen: list[int] = field(default_factory=list)

    def encode(self, text: str) -> list[int]:
        self.seen.append(len(text))
        return super().encode(text)

    def encode_chat(self, messages: Sequence[Message], *rest, **named) -> list[int]:
        self.seen.append(len(messages[0]["content"]))
        return super().encode_chat(messages, *rest, **named)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_encoded_once_or_twice(tmp_path, kind):
    counting = CountingTokenizer(chat_tokenizer().hf, frozenset({1}))
    made = Ruler((kind,)).problems(setting(tmp_path, counting, (6000,), limit=8))
    first = next(made)
    counting.seen.clear()
    assert len(list(made)) == 7
    full = sum(length > len(first.prompt) / 2 for length in counting.seen)
    assert 7 <= full <= 14


def test_a_length_beyond_the_context_is_refused():
    with pytest.raises(UserError, match=r"length=5000: the model's context is 4096 tokens; give"):
        fitted_problems({"a": drafts(1, 9)}, letters(1000, 5000, context=4096))


def test_a_length_that_is_too_short_is_refused_and_the_smallest_named():
    with pytest.raises(
        UserError, match=r"length=64: b needs more tokens .* that works is \d+$"
    ) as e:
        fitted_problems({"a": drafts(1, 9), "b": drafts(1, 200)}, letters(64))
    smallest = int(str(e.value).rsplit(" ", 1)[1])
    assert 390 <= smallest <= 412  # of 200 to 399 letters, 2 of the units and 10 of the answer
    kinds = {"a": drafts(1, 9), "b": drafts(1, 200)}
    found = list(fitted_problems(kinds, letters(smallest, limit=40)))
    assert len(found) == 80
    assert all(0.98 * smallest <= len(p.prompt) + 10 <= smallest for p in found)


def test_a_length_is_refused_where_steps_are_more_than_2_percent():
    with pytest.raises(UserError, match="the smallest length that works is 5000"):
        fitted_problems({"a": drafts(100, 9)}, letters(1000))


def test_the_smallest_length_holds_where_prompts_depend_on_it():
    def draw(chance: random.Random, length: int) -> Draft:
        return drafts(1, 500 if length < 1000 else 3000)(chance, length)

    with pytest.raises(UserError, match=r"the smallest length that works is (\d+)") as e:
        fitted_problems({"a": draw, "b": drafts(1, 1500)}, letters(100))
    smallest = int(str(e.value).rsplit(" ", 1)[1])
    assert smallest > 5000
    assert fitted_problems({"a": draw}, letters(smallest))


@pytest.mark.parametrize("can_chat", [True, False])
def test_the_smallest_length_works_for_all_of_ruler(tmp_path, can_chat):
    tokenizer = chat_tokenizer() if can_chat else byte_tokenizer()
    short = setting(tmp_path, tokenizer, (10,), limit=5)
    with pytest.raises(UserError, match="the smallest length that works is") as e:
        Ruler().problems(short)
    smallest = int(str(e.value).rsplit(" ", 1)[1])
    for problem in Ruler().problems(dataclasses.replace(short, lengths=(smallest,))):
        assert 0.98 * smallest <= size(problem, tokenizer) <= smallest
