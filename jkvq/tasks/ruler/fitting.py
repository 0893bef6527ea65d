"""Problems made to measure: prompts that fill a length in tokens and never exceed it."""

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jkvq.models.tokenizer import Tokenizer
from jkvq.support.errors import UserError
from jkvq.tasks.task import Problem, Setting

_EMPTY = 0.02  # the part of a length that may stay empty
_PROBLEMS = 100  # of each kind and length, where the user sets no limit
_DRAWS = 8  # problems that show how small a kind can be
_STEPS = 12  # sizes in a row that show how finely a prompt can grow
_ATTEMPTS = 50  # draws of one problem until a prompt fits


@dataclass(frozen=True)
class Draft:
    """A problem whose prompt can be made of any size.

    write: the prompt with so many units of filling; the more units, the more tokens.
    least: units of the smallest prompt.
    whole: units that belong together, such as the words of a line. A prompt has a multiple of them
        wherever one fits.
    max_new_tokens, expected, answer_start, stop: as a `Problem` has them.
    """

    write: Callable[[int], str]
    least: int
    max_new_tokens: int
    expected: Any
    answer_start: str = ""
    stop: tuple[str, ...] = ()
    whole: int = 1


# Draws a problem for a length in tokens.
Draw = Callable[[random.Random, int], Draft]


@dataclass(frozen=True)
class _Fit:
    """A prompt that fits, its units, and the tokens that a unit more would take."""

    prompt: str
    units: int
    slope: float


def fitted_problems(kinds: Mapping[str, Draw], setting: Setting) -> Iterator[Problem]:
    """Problems of every kind at every length of a setting, which is checked at once.

    The tokens of a prompt in the model's chat template, of the answer's start and of
    ``max_new_tokens`` fill at least 98% of the length and at most all of it. A problem follows from
    the seed, its kind, its length and its number alone.
    """
    for length in setting.lengths:
        _require_length(length, kinds, setting)
    cells = itertools.product(setting.lengths, kinds.items())
    return itertools.chain.from_iterable(
        _problems(kind, draw, length, setting) for length, (kind, draw) in cells
    )


def _problems(kind: str, draw: Draw, length: int, setting: Setting) -> Iterator[Problem]:
    """Problems of one kind and length. A first one, which is not used, shows how long they are."""
    _, pilot = _fitted(kind, draw, length, setting, -1, None)
    for index in range(setting.limit or _PROBLEMS):
        draft, fit = _fitted(kind, draw, length, setting, index, pilot)
        yield Problem(
            name=f"{kind}/{length}/{index}",
            prompt=fit.prompt,
            expected=draft.expected,
            max_new_tokens=draft.max_new_tokens,
            part=str(length),
            kind=kind,
            answer_start=draft.answer_start,
            stop=draft.stop,
        )


def _fitted(
    kind: str, draw: Draw, length: int, setting: Setting, index: int, like: _Fit | None
) -> tuple[Draft, _Fit]:
    """The problem of a number: the first of its draws for which a prompt fits, mostly the first.

    like: a problem of about as many units, from which to start.
    """
    for attempt in range(_ATTEMPTS):
        draft = draw(_chance(setting, kind, length, index, attempt), length)
        fit = _fit(draft, length, setting.tokenizer, like)
        if fit is not None:
            return draft, fit
    raise UserError(
        f"length={length}: no prompt of {kind} comes within 2% of it with this tokenizer; give a "
        "greater length"
    )


def _fit(draft: Draft, length: int, tokenizer: Tokenizer, like: _Fit | None) -> _Fit | None:
    """A prompt within the length; None where one unit more or less decides between too much and 2%.

    Tokens grow nearly in proportion to units: each try starts from the line through the last two.
    """
    low, high = math.ceil(length * (1 - _EMPTY)), length
    goal = (low + high) / 2
    units, slope = (like.units, like.slope) if like else _first_guess(draft, goal, tokenizer)
    under, over = draft.least - 1, sys.maxsize
    last: tuple[int, int] | None = None
    while over - under > 1:
        units = min(max(units, under + 1), over - 1)
        prompt = draft.write(units)
        tokens = _tokens(draft, prompt, tokenizer)
        if last is None and like:
            slope *= tokens / goal  # as much as this problem's units are larger than the other's
        elif last and (tokens - last[1]) * (units - last[0]) > 0:
            slope = (tokens - last[1]) / (units - last[0])
        if low <= tokens <= high:
            return _Fit(prompt, units, slope)
        under, over = (units, over) if tokens < low else (under, units)
        last = units, tokens
        aim = units + (goal - tokens) / slope
        whole = round(aim / draft.whole) * draft.whole
        units = whole if under < whole < over else round(aim)
    return None


def _first_guess(draft: Draft, goal: float, tokenizer: Tokenizer) -> tuple[int, float]:
    """Units for so many tokens, and tokens per unit, from two short prompts."""
    few, more = draft.least, 4 * draft.least
    short, longer = (_tokens(draft, draft.write(n), tokenizer) for n in (few, more))
    slope = (longer - short) / (more - few)
    return round((few + (goal - short) / slope) / draft.whole) * draft.whole, slope


def _tokens(draft: Draft, prompt: str, tokenizer: Tokenizer) -> int:
    """All that a problem takes of a model's context."""
    return len(tokenizer.encode_question(prompt, draft.answer_start)) + draft.max_new_tokens


def _require_length(length: int, kinds: Mapping[str, Draw], setting: Setting) -> None:
    if length > setting.context:
        raise UserError(
            f"length={length}: the model's context is {setting.context} tokens; give at most that"
        )
    works, needed_by = length, ""
    while True:  # what is drawn can depend on the length, and so can the smallest prompt
        needs = {kind: _smallest(kind, draw, works, setting) for kind, draw in kinds.items()}
        most = max(needs, key=needs.__getitem__)
        if needs[most] <= works:
            break
        works, needed_by = needs[most], most
    if works > length:
        raise UserError(
            f"length={length}: {needed_by} needs more tokens with this tokenizer; the smallest "
            f"length that works is {works}"
        )


def _smallest(kind: str, draw: Draw, length: int, setting: Setting) -> int:
    """The length that a kind needs for its smallest prompts, and to grow in steps of 2% or less.

    It is ``length`` itself where that is clearly enough.
    """

    def size(draft: Draft, more: int = 0) -> int:
        return _tokens(draft, draft.write(draft.least + more), setting.tokenizer)

    first = draw(_chance(setting, kind, length, "smallest", 0), length)
    small, larger = size(first), size(first, first.whole)
    if max(2 * larger, (larger - small) / _EMPTY) < length:
        return length
    steps = itertools.pairwise(size(first, more) for more in range(_STEPS))
    step = max(after - before for before, after in steps)
    others = (draw(_chance(setting, kind, length, "smallest", i), length) for i in range(1, _DRAWS))
    return max(small, *map(size, others), math.ceil(step / _EMPTY))


def _chance(setting: Setting, *parts: object) -> random.Random:
    return random.Random("/".join(map(str, (setting.seed, *parts))))
