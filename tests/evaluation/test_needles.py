import re

import pytest

import jkvq
from jkvq.evaluation.needles import TASKS, niah, questions, read_haystack, score
from tests.tiny import byte_tokenizer, model_of

HAYSTACK = " ".join(f"Sentence {i} says nothing much." for i in range(400))
FACT = re.compile(r"The magic number of (\w+) is (\d+)\.")


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_prompts_hold_their_needles_where_they_belong(name, depth):
    task = TASKS[name]
    asked = questions(task, byte_tokenizer(), HAYSTACK, 2000, depth, trial=1)
    assert len(asked) == task.asked
    for question in asked:
        text = question.prompt + question.answer_start
        assert 1950 < len(byte_tokenizer().encode(text)) <= 2000  # within a sentence or so
        prose = text[: text.index("\n\nWhat")]
        facts = [(match.group(1), match.group(2), match.start()) for match in FACT.finditer(prose)]
        assert len(facts) == task.needles * task.values
        assert prose.count("phone number") == task.distractors
        city = re.search(r"magic numbers? of (\w+)\? Answer", text)
        assert city is not None
        assert {n for c, n, _ in facts if c == city.group(1)} == set(question.expected)
    first = asked[0].prompt
    at = first.index(f"is {asked[0].expected[0]}.")
    end = first.index("\n\nWhat")
    assert at / end == pytest.approx(depth, abs=0.12)
    if task.together:
        places = [first.index(f"is {question.expected[0]}.") for question in asked]
        assert max(places) - min(places) < 120


def test_needles_differ_between_trials_and_not_between_calls():
    def prompts(trial):
        return questions(TASKS["single"], byte_tokenizer(), HAYSTACK, 800, 0.5, trial)

    assert prompts(0) == prompts(0)
    assert prompts(0)[0].expected != prompts(1)[0].expected


def test_an_answer_scores_the_numbers_it_holds():
    assert score(("12345", "67890"), "It is 12345 and 67890.") == 1
    assert score(("12345", "67890"), "12345, 99999") == 0.5
    assert score(("12345", "67890"), "1234567890") == 0


def _oracle(llm, asked, budget):
    """Finds needles by reading; forgets those in the second half of the text with one cache."""
    answers = []
    for question in asked:
        text = question.prompt
        city = re.search(r"magic numbers? of (\w+)\? Answer", text)
        assert city is not None
        seen = text if llm.spec.page == 8 else text[: len(text) // 2]
        answers.append(", ".join(n for c, n in FACT.findall(seen) if c == city.group(1)))
    assert budget >= 24
    return answers


def test_niah_scores_what_the_answers_hold(tiny):
    llms = {"all": tiny, "half": jkvq.with_cache(model_of(tiny), "f32,page=16")}
    found = niah(
        *(llms, HAYSTACK),
        tasks=list(TASKS),
        lengths=[700, 900],
        depths=[0.0, 1.0],
        trials=2,
        answer=_oracle,
    )
    assert len(found["all"]) == len(TASKS) * 4
    assert all(cell.score == 1 for cell in found["all"])
    half = {(cell.task, cell.depth): cell.score for cell in found["half"]}
    assert (half["single", 0.0], half["single", 1.0]) == (1, 0)
    assert (half["multi-key", 0.0], half["multi-key", 1.0]) == (1, 0)
    assert 0 < half["multi-value", 0.0] < 1
    assert 0 < half["multi-query", 0.0] < 1


def test_niah_asks_the_model_itself(tiny):
    found = niah({"": tiny}, HAYSTACK, tasks=["single"], lengths=[300], depths=[0.5], trials=1)
    assert [cell.score for cell in found[""]] == [0]  # a random model knows nothing


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tasks": ["singel"]}, "task 'singel' is not known: did you mean single"),
        ({"lengths": [1024]}, "length=1024: with room for an answer, 1 to 1000 tokens fit"),
        ({"lengths": [30]}, "length=30: the question alone takes"),
        ({"depths": [1.5]}, "depth=150%: from 0% to 100%"),
        ({"trials": 0}, "trials=0"),
    ],
)
def test_bad_grids_are_refused(tiny, changes, sentence):
    good = {"tasks": ["single"], "lengths": [500], "depths": [0.5], "trials": 1}
    with pytest.raises(jkvq.UserError, match=sentence):
        niah({"": tiny}, HAYSTACK, answer=_oracle, **(good | changes))


def test_a_haystack_that_is_too_short_or_missing_is_refused(tiny, tmp_path):
    with pytest.raises(jkvq.UserError, match="length=500: the haystack has too little text"):
        questions(TASKS["single"], tiny.tokenizer, "Too short.", 500, 0.5, 0)
    with pytest.raises(jkvq.UserError, match="is no text file and no folder"):
        read_haystack(tmp_path)
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    assert read_haystack(tmp_path) == "first\n\nsecond"
