import dataclasses
import sys

import pytest

from jkvq import UserError
from jkvq.tasks.ruler.ruler import KINDS, Ruler
from jkvq.tasks.ruler.words import english
from jkvq.tasks.task import Problem, Setting
from tests.tasks.ruler.made_up import chat_tokenizer, setting, size, tokenizer_of
from tests.tiny import byte_tokenizer


def off_length(settings: Setting) -> list[str]:
    """Problems that are longer than they should be, or shorter by more than 2%."""
    made = list(Ruler().problems(settings))
    assert len(made) == len(settings.lengths) * len(KINDS) * (settings.limit or 100)
    sizes = ((problem, size(problem, settings.tokenizer)) for problem in made)
    return [p.name for p, tokens in sizes if not 0.98 * int(p.part) <= tokens <= int(p.part)]


def test_lengths_hold_for_a_small_tokenizer(tmp_path):
    settings = setting(tmp_path, chat_tokenizer(), (2500, 6500), limit=2)
    assert off_length(settings) == []


def test_lengths_hold_for_a_tokenizer_that_cannot_chat(tmp_path):
    settings = setting(tmp_path, byte_tokenizer(), (9000,), limit=2)
    assert off_length(settings) == []


def test_lengths_hold_for_a_real_tokenizer(tmp_path, smollm2_file):
    settings = setting(tmp_path, tokenizer_of(smollm2_file), (1024, 4096), limit=2)
    assert off_length(settings) == []


def test_problems_have_their_names(tmp_path):
    made = list(Ruler().problems(setting(tmp_path, chat_tokenizer(), (2500, 3000), limit=2)))
    assert [problem.name for problem in made] == [
        f"{kind}/{length}/{index}" for length in (2500, 3000) for kind in KINDS for index in (0, 1)
    ]
    assert all(f"{p.kind}/{p.part}/" in p.name and p.chat and not p.stop for p in made)
    assert set(KINDS) == {
        *(f"niah_single_{i}" for i in (1, 2, 3)),
        *(f"niah_multikey_{i}" for i in (1, 2, 3)),
        *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"),
    }


def test_a_larger_limit_keeps_the_first_and_a_seed_decides(tmp_path):
    def made(**changes) -> dict[str, Problem]:
        base = setting(tmp_path, chat_tokenizer(), (2500,), limit=2)
        return {p.name: p for p in Ruler().problems(dataclasses.replace(base, **changes))}

    few, more, other = made(), made(limit=4, lengths=(3000, 2500)), made(seed=1)
    assert few.items() <= more.items()
    assert len(more) == 4 * len(few)
    assert all(few[name].prompt != other[name].prompt for name in few)
    assert all(few[name].expected != other[name].expected for name in few)


def test_a_hundred_problems_are_made_where_there_is_no_limit(tmp_path):
    made = Ruler(("niah_single_1",)).problems(setting(tmp_path, chat_tokenizer(), (900,), None))
    assert len({problem.prompt for problem in made}) == 100


def test_essays_are_asked_for_where_they_are_needed_alone(tmp_path):
    (tmp_path / "haystack").mkdir()
    settings = setting(tmp_path, chat_tokenizer(), (2500,), limit=1)
    for essays in ([], ["   \n"]):
        for number, text in enumerate(essays):
            (tmp_path / "haystack" / f"{number}.txt").write_text(text)
        with pytest.raises(UserError, match=r"hides needles in essays, and .*haystack has none"):
            Ruler().problems(settings)
    without = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
    missing = dataclasses.replace(settings, data=tmp_path / "nowhere")
    assert len(list(Ruler(without).problems(missing))) == len(without)


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="RULER has no kind 'vtt': did you mean vt"):
        Ruler(("vtt",))
    english.cache_clear()
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    with pytest.raises(UserError, match=r"wonderwords, .* pip install 'jkvq\[eval\]'"):
        Ruler(("cwe",)).problems(setting(tmp_path, chat_tokenizer(), (2500,)))


@pytest.mark.parametrize(
    ("expected", "answer", "score"),
    [
        (["1234567"], "The number is 1234567.", 1),
        (["1234567"], "12345678", 1),  # RULER looks for the string, not for the number
        (["1234567"], "1,234,567", 0),
        (["1234567", "7654321"], "7654321 and no other", 0.5),
        (["ABCDE", "FGHIJ", "KLMNO", "PQRST", "UVWXY"], "abcde fghij klmno", 0.6),
        (["Early", "atm"], "early, ATM", 1),
        (["alpha", "alphabet"], "alphabet", 1),
        (["a", "b", "c", "d"], "", 0),
    ],
)
def test_the_score_is_the_part_of_the_strings_that_occur(expected, answer, score):
    assert Ruler().score(Problem("", "", expected, 1), answer) == score
