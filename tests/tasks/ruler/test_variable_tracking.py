import re

import pytest

from jkvq.tasks.ruler import variable_tracking
from jkvq.tasks.ruler.ruler import Ruler
from jkvq.tasks.task import Problem
from tests.tasks.ruler.made_up import chat_tokenizer, setting, tokenizer_of
from tests.tiny import byte_tokenizer

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
TASK = re.compile(
    r"Memorize and track the chain\(s\) of variable assignment hidden in the following text\.\n\n"
    r"(.*?)\nQuestion: Find all variables that are assigned the value (\d{5}) in the text above\.",
    re.DOTALL,
)
ANSWER = (
    " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are "
    "assgined the value {value}, they are: "
)


def variables(context: str, value: str) -> list[str]:
    """Variables that have the value, from the assignments one after another."""
    values: dict[str, str] = {}
    for name, source, number in re.findall(r"VAR ([A-Z]+) = (?:VAR ([A-Z]+)|(\d+))", context):
        assert name not in values
        assert number or [source] == list(values)[-1:]  # each takes it from the one before
        values[name] = number or values[source]
    return [name for name, found in values.items() if found == value]


def check(problem: Problem) -> None:
    (worked, first), (context, value) = TASK.findall(problem.prompt)
    assert problem.expected == variables(context, value)
    assert [len(name) for name in problem.expected] == [5] * 5
    assert problem.answer_start == ANSWER.format(value=value)
    rest = [line for line in context.split("\n") if not line.startswith("VAR ")]
    assert set(rest[:-1]) == {NOISE}
    assert NOISE.startswith(rest[-1])

    names = variables(worked, first)
    assert [len(name) for name in names] == [3] * 5
    shown = f"{ANSWER.format(value=first)} {' '.join(names)}\n\nMemorize and track"
    assert problem.prompt.count(shown) == 1


def problems(tmp_path, limit=6) -> list[Problem]:
    return list(Ruler(("vt",)).problems(setting(tmp_path, chat_tokenizer(), (3000,), limit)))


def test_chains_give_the_expected_variables(tmp_path):
    found = problems(tmp_path)
    for problem in found:
        check(problem)
        assert problem.max_new_tokens == 30
    assert len({problem.expected[0] for problem in found}) == len(found)


def test_assignments_are_spread(tmp_path):
    first, last = zip(
        *(
            [problem.prompt.rindex(f"VAR {problem.expected[i]} =") for i in (0, 4)]
            for problem in problems(tmp_path, limit=12)
        ),
        strict=True,
    )
    assert max(first) - min(first) > 500
    assert max(last) - min(last) > 500


@pytest.mark.parametrize(
    "names",
    [
        ["AAAAA", "BBBBB", "CCCCC", "DDDDD", "AAAAA"],  # assigned twice
        ["BBBBB", "AAAAA", "CCCCC", "DDDDD", "EEEEE"],  # in another order than expected
        ["AAAAA", "BBBBB", "CCCCC", "DDDDD", "FFFFF"],  # another variable than expected
    ],
)
def test_a_wrong_chain_would_be_caught(tmp_path, monkeypatch, names):
    right = variable_tracking._chain_in_noise
    wanted = ["AAAAA", "BBBBB", "CCCCC", "DDDDD", "EEEEE"]

    def wrong(given, *rest):
        return right(names if given == wanted else given, *rest)

    drawn = variable_tracking._names
    monkeypatch.setattr(
        variable_tracking,
        "_names",
        lambda chance, letters: list(wanted) if letters == 5 else drawn(chance, letters),
    )
    check(problems(tmp_path, limit=1)[0])
    monkeypatch.setattr(variable_tracking, "_chain_in_noise", wrong)
    with pytest.raises(AssertionError):
        check(problems(tmp_path, limit=1)[0])


def test_a_chain_in_the_wrong_order_would_be_caught(tmp_path, monkeypatch):
    right = variable_tracking._chain_in_noise

    def backwards(*given):
        return "\n".join(reversed(right(*given).split("\n")))

    monkeypatch.setattr(variable_tracking, "_chain_in_noise", backwards)
    with pytest.raises(AssertionError):
        check(problems(tmp_path, limit=1)[0])


def test_the_worked_example_takes_500_tokens(tmp_path, smollm2_file):
    tokenizer = tokenizer_of(smollm2_file)
    [problem] = Ruler(("vt",)).problems(setting(tmp_path, tokenizer, (2000,), limit=1))
    example = problem.prompt[: problem.prompt.rindex("Memorize and track")]
    assert 465 < len(tokenizer.encode(example)) < 520  # with its answer; a line takes 25


def test_the_worked_example_has_a_line_for_each_assignment_at_least():
    assert variable_tracking.example_sentences(byte_tokenizer()) == 25
