"""What may be asked of a generation, for all prompts or for each."""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from jkvq.engine.sampling import MOST_TOPS, Sampling
from jkvq.support.arguments import INT32, flag, refusal, shown, whole
from jkvq.support.errors import UserError, nearest

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Options:
    """What `generate` and `stream` take, checked when it is made.

    max_new_tokens: at most so many; the model's context may end the text earlier. 0 goes with
        prompt_logprobs: the prompt alone is looked at.
    temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty,
        logit_bias: see `jkvq.engine.sampling.Sampling`.
    seed: of the random stream, from 0 to 2**64 - 1; None draws a new one for each prompt. With one
        seed each prompt of a list has a stream of its own: the first has the seed itself, the
        others seeds made of it and their place, and `Generation.seed` is what gives that prompt the
        same text alone.
    stop: a string or several that end the text; they are not part of it.
    stop_tokens: tokens that end it, besides the model's own.
    ignore_eos: go on past the model's own stop tokens.
    chat: wrap text in the model's chat template; None does so if the model has one.
    top_logprobs: so many of the likeliest tokens are told wherever one is drawn, up to 20.
    prompt_logprobs: the tokens of the prompt are scored too; nothing stored is used for it.
    grammar: that the text follows, as llguidance writes it; `json_grammar` makes one of a schema.
    answer_start: text with which the answer begins, given to the model; what is generated follows
        it.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_tokens: Sequence[int] = ()
    ignore_eos: bool = False
    chat: bool | None = None
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    grammar: str | None = None
    answer_start: str = ""

    def __post_init__(self):
        rules = vars(Sampling(**self._rules))
        checked = {
            **rules,
            "seed": None if self.seed is None else rules["seed"],
            "max_new_tokens": whole(
                *("max_new_tokens", self.max_new_tokens),
                *(0 if self.prompt_logprobs else 1, INT32, "a whole number, 1 or more"),
            ),
            "top_logprobs": whole(
                *("top_logprobs", self.top_logprobs, 0, MOST_TOPS),
                f"a whole number from 0 to {MOST_TOPS}",
            ),
            "prompt_logprobs": flag("prompt_logprobs", self.prompt_logprobs),
            "stop": _strings(self.stop),
            "stop_tokens": _tokens(self.stop_tokens),
            "ignore_eos": flag("ignore_eos", self.ignore_eos),
            "chat": None if self.chat is None else flag("chat", self.chat),
            "grammar": None if self.grammar is None else _text("grammar", self.grammar),
            "answer_start": _text("answer_start", self.answer_start),
        }
        if self.ignore_eos and self.grammar is not None:
            raise UserError("ignore_eos=True: a text with a grammar ends where that does; leave it")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return _unchecked(Sampling, self._rules)

    @property
    def _rules(self) -> dict[str, Any]:
        """The fields of a `Sampling`."""
        rules = {name: getattr(self, name) for name in _RULES}
        return {**rules, "seed": 0 if self.seed is None else self.seed}

    def but(self, **checked: Any) -> "Options":
        """The same with other values; nothing is checked again, so it costs little."""
        return _unchecked(Options, {**vars(self), **checked})

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())


_NAMES = [each.name for each in dataclasses.fields(Options)]
_RULES = [each.name for each in dataclasses.fields(Sampling)]


def options_by_prompt(
    options: Options | Sequence[Options] | None, changes: Mapping[str, Any], prompts: int
) -> list[Options]:
    """The options of each prompt, every one with a seed.

    Args:
        options: for all prompts, or one for each.
        changes: fields that take the place of theirs; seed may be a list, one for each.
        prompts: how many there are.
    """
    for name in changes:
        if name not in _NAMES:
            raise UserError(f"generate has no option '{name}': {nearest(name, _NAMES)}")
    several = isinstance(options, list | tuple)
    given = options if several else [Options() if options is None else options] * prompts
    seeds = changes.get("seed")
    own_seeds = isinstance(seeds, list | tuple | range | np.ndarray)
    changed = [{**changes, "seed": seed} for seed in seeds] if own_seeds else [changes] * prompts
    for count, what in ((len(given), "options"), (len(changed), "seeds")):
        if count != prompts:
            raise UserError(f"{count} {what} for {prompts} prompt(s): give one, or one for each")
    asked = [
        dataclasses.replace(_checked(each), **change)
        for each, change in zip(given, changed, strict=True)
    ]
    shared = not own_seeds and (not several or "seed" in changes)
    return [
        each.but(seed=own_seed(each.seed, index if shared else 0))
        for index, each in enumerate(asked)
    ]


def _checked(options: Any) -> Options:
    if not isinstance(options, Options):
        raise UserError(
            f"{shown(options)} is no jkvq.Options: give one, or a list with one for each prompt, "
            "or single options by name such as temperature=0.7"
        )
    return options


def own_seed(seed: int | None, index: int) -> int:
    """The seed of a text among several: none but the first has the one that was given for all.

    Its number is not simply added: lists with seeds 0 and 1 would have most streams in common.
    """
    if seed is None:
        return secrets.randbits(32)
    if index == 0:
        return seed
    return mixed_seed(seed, index)


def mixed_seed(seed: int, index: int) -> int:
    """A seed made of another and a place."""
    mixed = np.random.SeedSequence(seed, spawn_key=(index,)).generate_state(1, np.uint64)
    return int(mixed[0]) >> 11  # below 2**53: every reader of JSON has it exactly


def _unchecked(kind: type[_Kind], values: Mapping[str, Any]) -> _Kind:
    """One of a dataclass, of values that were checked before."""
    made = object.__new__(kind)
    vars(made).update(values)
    return made


def _text(name: str, given: Any) -> str:
    try:
        given.encode()  # halves of characters are no text
        return given
    except (AttributeError, UnicodeEncodeError):
        raise refusal(name, given, "text") from None


def _strings(stop: Any) -> tuple[str, ...]:
    """Stop strings as a tuple."""
    listed = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(listed, list | tuple | np.ndarray):
        raise refusal("stop", stop, "a string, a list of strings, or None")
    for text in listed:
        if not isinstance(text, str) or not text:
            raise refusal("stop", stop, "strings of at least one character")
    return tuple(map(str, listed))


def _tokens(tokens: Any) -> tuple[int, ...]:
    """Stop tokens as a tuple."""
    if tokens is None:
        return ()
    if not isinstance(tokens, list | tuple | set | frozenset | range | np.ndarray):
        raise refusal("stop_tokens", tokens, "a list of tokens; put a single one in brackets")
    return tuple(
        whole("stop_tokens", token, 0, INT32, "tokens are numbers from 0") for token in tokens
    )
