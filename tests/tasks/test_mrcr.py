import dataclasses
import re
from collections import Counter
from pathlib import Path

import pytest

from jkvq import UserError
from jkvq.tasks import mrcr
from jkvq.tasks.mrcr import Mrcr
from jkvq.tasks.task import Problem, Setting
from tests.tasks.ruler.made_up import chat_tokenizer, size, tokenizer_of
from tests.tiny import byte_tokenizer

END = "\n======END EXAMPLE======\n\n"
QUESTION = re.compile(
    r"Prepend (\w{10}) to the ([1-8])(?:st|nd|rd|th) \(1 indexed\) (.+) about (.+)\. "
    r"Do not include any other text in your response\."
)


def settings(tokenizer=None, lengths=(6000,), limit=4, seed=0) -> Setting:
    return Setting(tokenizer or chat_tokenizer(), 10**6, Path("nowhere"), lengths, limit, seed)


def turns(conversation: str) -> list[tuple[str, str]]:
    """What was asked and answered; the last may have no answer."""
    found = []
    for turn in ("\n\n" + conversation).split("\n\nUser: ")[1:]:
        asked, _, answer = turn.partition("\nAssistant: ")
        found.append((asked, answer))
    return found


def answered(conversation: list[tuple[str, str]], question: str) -> tuple[str, str, int]:
    """The string to prepend, the piece that is asked for, and how many have its request."""
    match = QUESTION.fullmatch(question)
    assert match
    prefix, number, form, topic = match.groups()
    request = re.compile(rf"write an? {form} about {topic}")
    pieces = [piece for asked, piece in conversation if request.fullmatch(asked)]
    return prefix, pieces[int(number) - 1], len(pieces)


def check(problem: Problem) -> None:
    example, _, text = problem.prompt.partition(END)
    *conversation, (question, nothing) = turns(text)
    assert nothing == ""
    prefix, piece, needles = answered(conversation, question)
    assert problem.kind == f"{needles}needle"
    assert problem.expected == {"prefix": prefix, "answer": prefix + piece}
    assert text.count(piece) == 1
    assert max(Counter(piece for _, piece in conversation).values()) == 1
    assert prefix not in text.replace(question, "")

    head, _, body = example.partition("======EXAMPLE======\n")
    assert head.startswith("Here is an example of a conversation succeeded by")
    *conversation, (question, answer) = turns(body)
    prefix, piece, needles = answered(conversation, question)
    assert (answer, needles) == (prefix + piece, 2)
    topic = question.partition(". Do not")[0].rpartition(" ")[2]
    assert topic not in text


def test_the_piece_that_is_asked_for_is_found_by_reading():
    made = list(Mrcr().problems(settings()))
    assert [problem.name for problem in made] == [
        f"{needles}needle/6000/{index}" for needles in (2, 4, 8) for index in range(4)
    ]
    for problem in made:
        check(problem)
    asked = {QUESTION.findall(problem.prompt)[-1][1:] for problem in made}
    assert len({number for number, *_ in asked}) > 2
    assert len({form for _, form, _ in asked}) > 2


def test_pieces_differ_where_there_are_few_words(monkeypatch):
    topics = mrcr._WORDS["topic"]
    few = {slot: words[:1] for slot, words in mrcr._WORDS.items()} | {"topic": topics}
    monkeypatch.setattr(mrcr, "_WORDS", few)
    monkeypatch.setattr(mrcr, "_BODY", mrcr._BODY[:4])
    for problem in Mrcr().problems(settings()):
        check(problem)


def test_other_requests_are_like_the_one_that_is_asked_for():
    for problem in Mrcr().problems(settings(lengths=(12_000,), limit=1)):
        text = problem.prompt.partition(END)[2]
        _, _, form, topic = QUESTION.findall(text)[-1]
        requests = Counter(asked for asked, _ in turns(text)[:-1])
        same_form = [asked for asked in requests if f" {form} about" in asked]
        same_topic = [asked for asked in requests if asked.endswith(f"about {topic}")]
        assert len(same_form) > 1
        assert len(same_topic) > 1
        assert sum(count > 1 for count in requests.values()) > 1  # others come more than once, too


def test_answers_that_are_asked_for_lie_all_over_the_conversation():
    made = Mrcr().problems(settings(limit=30))
    depths = [
        problem.prompt.rindex(problem.expected["answer"][10:]) / len(problem.prompt)
        for problem in made
        if problem.kind == "2needle"
    ]
    assert min(depths) < 0.35  # the example comes first
    assert max(depths) > 0.8


@pytest.mark.parametrize("tokenizer", [chat_tokenizer, byte_tokenizer])
def test_lengths_hold(tokenizer):
    for problem in Mrcr().problems(settings(tokenizer(), (8000,), limit=2)):
        assert 7840 <= size(problem, tokenizer()) <= 8000
        answer = len(tokenizer().encode(problem.expected["answer"]))
        assert problem.max_new_tokens == 2 * answer


def test_lengths_hold_for_a_real_tokenizer(smollm2_file):
    tokenizer = tokenizer_of(smollm2_file)
    for problem in Mrcr().problems(settings(tokenizer, (2048, 4096), limit=2)):
        length = int(problem.part)
        assert 0.98 * length <= size(problem, tokenizer) <= length


def test_the_last_turn_is_opened_where_there_is_no_chat_template():
    [chat, *_], [plain, *_] = (
        list(Mrcr().problems(settings(tokenizer, (8000,), limit=1)))
        for tokenizer in (chat_tokenizer(), byte_tokenizer())
    )
    assert (chat.answer_start, plain.answer_start) == ("", "\nAssistant:")
    assert plain.stop == ("\nUser:",)


def test_a_larger_limit_keeps_the_first_and_a_seed_decides():
    def made(**changes) -> dict[str, Problem]:
        base = settings(limit=2)
        return {p.name: p for p in Mrcr().problems(dataclasses.replace(base, **changes))}

    few, more, other = made(), made(limit=3, lengths=(6500, 6000)), made(seed=1)
    assert few.items() <= more.items()
    assert all(few[name].prompt != other[name].prompt for name in few)


def test_a_length_that_is_too_short_is_refused():
    with pytest.raises(UserError, match=r"length=300: 8needle needs more .* works is (\d+)") as e:
        Mrcr().problems(settings(lengths=(300,)))
    smallest = int(str(e.value).rsplit(" ", 1)[1])
    for problem in Mrcr().problems(settings(lengths=(smallest,))):
        assert 0.98 * smallest <= size(problem, chat_tokenizer()) <= smallest


@pytest.mark.parametrize("twist", ["twice", "all alike", "too many"])
def test_a_wrong_generator_would_be_caught(monkeypatch, twist):
    text = mrcr._text

    def wrong(given):
        if len(given) == 3:  # the example
            return text(given)
        asked, count = Counter(request for request, _ in given).most_common(1)[0]
        assert count == 8
        [first, second, *_] = [i for i, (request, _) in enumerate(given) if request == asked]
        changed = list(given)
        if twist == "too many":
            changed.insert(0, (asked, ["One more."]))
        else:
            changed[second] = changed[first]
            if twist == "all alike":
                changed = [(asked, piece) for _, piece in changed]
        return text(changed)

    draws = {"8needle": mrcr._draw(8, chat_tokenizer())}
    right = next(mrcr.fitted_problems(draws, settings()))
    check(right)
    monkeypatch.setattr(mrcr, "_text", wrong)
    with pytest.raises(AssertionError):
        check(next(mrcr.fitted_problems(draws, settings())))


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("aYooSG8CQgabcd", 1),
        ("aYooSG8CQgbcde", 0.75),  # twice the three letters that match, of eight
        ("aYooSG8CQg", 0),
        (" \naYooSG8CQgabcd", 1),
        ("abcd", 0),
        ("ayoosg8cqgabcd", 0),
        ("Sure! aYooSG8CQgabcd", 0),
        ("aYooSG8CQgabcd and more", 2 * 4 / (4 + 13)),
        ("", 0),
    ],
)
def test_the_score_is_how_alike_answer_and_piece_are(answer, score):
    expected = {"prefix": "aYooSG8CQg", "answer": "aYooSG8CQgabcd"}
    assert Mrcr().score(Problem("", "", expected, 1), answer) == pytest.approx(score)
