import dataclasses

import numpy as np
import pytest

import jkvq
from jkvq.engine.options import options_by_prompt

NAN = float("nan")
BAD = [
    ({"max_new_tokens": "5"}, "max_new_tokens='5': a whole number, 1 or more"),
    ({"max_new_tokens": 2.5}, "max_new_tokens=2.5: a whole number"),
    ({"max_new_tokens": None}, "max_new_tokens=None: a whole number"),
    ({"max_new_tokens": 0}, "max_new_tokens=0: "),
    ({"max_new_tokens": True}, "max_new_tokens=True: "),
    ({"max_new_tokens": 2**31}, "max_new_tokens=2147483648: "),
    ({"temperature": "0.5"}, r"temperature='0.5': a number, 0 \(most likely token\) or more"),
    ({"temperature": -1}, "temperature=-1: "),
    ({"temperature": NAN}, "temperature=nan: "),
    ({"temperature": np.float32("inf")}, "temperature=inf: "),
    ({"temperature": None}, "temperature=None: "),
    ({"top_k": 3_000_000_000}, "top_k=3000000000: a whole number from 1 to 2147483647, or 0 for"),
    ({"top_k": 1.0}, "top_k=1.0: "),
    ({"top_p": 0}, "top_p=0: a number above 0 and at most 1"),
    ({"top_p": 2.0}, "top_p=2.0: "),
    ({"min_p": [0.1]}, r"min_p=\[0.1\]: a number from 0 \(off\) to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty=0: a number above 0; 1 is off"),
    ({"frequency_penalty": 3}, "frequency_penalty=3: a number from -2 to 2"),
    ({"logit_bias": 5}, "logit_bias=5: a number from -100 to 100 for each token"),
    ({"logit_bias": {5: 101}}, "logit_bias=101: a number from"),
    ({"logit_bias": {"5": 1}}, "logit_bias='5': a number from"),
    ({"logit_bias": [5, 6]}, r"logit_bias=\[5, 6\]: a number from"),
    ({"stop": 5}, "stop=5: a string, a list of strings, or None"),
    ({"stop": ""}, "stop='': strings of at least one character"),
    ({"stop": ["a", ""]}, r"stop=\['a', ''\]: strings of at least"),
    ({"stop": b"a"}, "stop=b'a': a string"),
    ({"stop_tokens": 5}, "stop_tokens=5: a list of tokens; put a single one in brackets"),
    ({"stop_tokens": [2**40]}, "stop_tokens=1099511627776: tokens are numbers from 0"),
    ({"stop_tokens": [True]}, "stop_tokens=True: tokens"),
    ({"stop_tokens": ["a"]}, "stop_tokens='a': tokens"),
    ({"stop_tokens": True}, "stop_tokens=True: a list"),
    ({"seed": "x"}, r"seed='x': a whole number from 0 to 2\*\*64 - 1"),
    ({"seed": -1}, "seed=-1: "),
    ({"seed": np.int64(-1)}, "seed=-1: "),
    ({"seed": 2**64}, "seed=18446744073709551616: "),
    ({"seed": True}, "seed=True: "),
    ({"seed": 1.5}, "seed=1.5: "),
    ({"ignore_eos": "no"}, "ignore_eos='no': True or False"),
    ({"chat": 1}, "chat=1: True or False"),
    ({"answer_start": None}, "answer_start=None: text"),
    ({"answer_start": "\udce9"}, "answer_start=.*: text"),
]


@pytest.mark.parametrize(("given", "sentence"), BAD)
def test_options_out_of_range_or_type_are_refused(given, sentence):
    with pytest.raises(jkvq.UserError, match=f"^{sentence}"):
        jkvq.Options(**given)


def test_options_of_numpy_become_pythons():
    given = {
        "max_new_tokens": np.int32(5),
        "temperature": np.float32(0.5),
        "top_k": np.uint8(3),
        "top_p": np.float64(0.5),
        "min_p": np.int64(0),
        "seed": np.int64(3),
        "stop": np.array(["a", "b"]),
        "stop_tokens": np.array([1, 2]),
        "ignore_eos": np.True_,
    }
    found = jkvq.Options(**given)  # pyright: ignore[reportArgumentType]
    wanted = jkvq.Options(
        5, 0.5, 3, 0.5, seed=3, stop=["a", "b"], stop_tokens=(1, 2), ignore_eos=True
    )
    assert found == wanted
    for name in ("max_new_tokens", "temperature", "top_k", "min_p", "seed", "ignore_eos"):
        assert type(getattr(found, name)) in (int, float, bool)


@pytest.mark.parametrize(("given", "strings"), [(None, ()), ("ab", ("ab",)), (["a"], ("a",))])
def test_stop_is_a_string_or_several_or_none(given, strings):
    assert jkvq.Options(stop=given).stop_strings == strings


def seeds(options, changes, prompts: int) -> list[int | None]:
    return [each.seed for each in options_by_prompt(options, changes, prompts)]


def test_one_seed_becomes_one_for_each_prompt():
    found = seeds(None, {"seed": 3}, 1000)
    assert found[0] == 3
    assert found == seeds(jkvq.Options(seed=3), {}, 1000)
    others = {seed: set(seeds(None, {"seed": seed}, 1000)) for seed in (0, 1, 2, 4, 2**64 - 1)}
    assert len(set(found).union(*others.values())) == 6000  # no list shares a stream with another
    assert all(type(seed) is int and 0 <= seed < 2**53 for seed in found)
    assert found[1] == 9005720297816676  # texts can be had again in later versions
    assert seeds([jkvq.Options()] * 2, {"seed": 3}, 2) == found[:2]


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-31])
def test_next_to_no_temperature_is_none(temperature):
    """Scores that are divided by as little are infinite."""
    assert jkvq.Options(temperature=temperature).temperature == 0
    assert jkvq.Options(temperature=1e-29).temperature == 1e-29


def test_what_changes_unchecked_is_all_that_does():
    given = jkvq.Options(temperature=0.5, logit_bias={5: 1}, stop="a", seed=3)
    assert given.but(seed=4) == dataclasses.replace(given, seed=4) != given
    assert (given.but(seed=4).sampling.seed, given.sampling.seed) == (4, 3)


def test_seeds_given_for_each_prompt_are_taken_as_they_are():
    for given in ([5, 5, 6], (np.int64(5), 5, 6), np.array([5, 5, 6]), range(5, 8)):
        assert seeds(None, {"seed": given}, 3) == [int(seed) for seed in given]
    assert seeds([jkvq.Options(seed=5), jkvq.Options(seed=5)], {}, 2) == [5, 5]


def test_no_seed_is_a_new_one_for_each_prompt_each_time():
    drawn = [*seeds(None, {}, 3), *seeds(jkvq.Options(seed=3), {"seed": None}, 3)]
    assert len({*drawn, *seeds([jkvq.Options()] * 3, {}, 3)}) == 9


def test_changes_take_the_place_of_the_options_of_each_prompt():
    given = [jkvq.Options(temperature=0.5, top_k=4), jkvq.Options(max_new_tokens=7)]
    found = options_by_prompt(given, {"temperature": 1.5}, 2)
    assert [(each.temperature, each.top_k, each.max_new_tokens) for each in found] == [
        (1.5, 4, 256),
        (1.5, 0, 7),
    ]


@pytest.mark.parametrize(
    ("options", "changes", "sentence"),
    [
        ([jkvq.Options()] * 3, {}, r"3 options for 2 prompt\(s\): give one, or one for each"),
        (None, {"seed": [1]}, r"1 seeds for 2 prompt\(s\)"),
        (None, {"seed": [1, "x"]}, "seed='x': a whole number"),
        ([jkvq.Options(), None], {}, "None is no jkvq.Options"),
        ({"top_k": 1}, {}, "{'top_k': 1} is no jkvq.Options: give one, or a list"),
        (None, {"stops": "a"}, "generate has no option 'stops': did you mean stop"),
    ],
)
def test_options_that_do_not_fit_the_prompts_are_refused(options, changes, sentence):
    with pytest.raises(jkvq.UserError, match=f"^{sentence}"):
        options_by_prompt(options, changes, 2)
