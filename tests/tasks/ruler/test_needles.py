import re
from collections import Counter
from collections.abc import Sequence
from itertools import cycle, islice

import pytest

from jkvq.tasks.ruler import needles
from jkvq.tasks.ruler.ruler import Ruler
from jkvq.tasks.task import Problem
from tests.tasks.ruler.made_up import chat_tokenizer, setting

# From RULER's synthetic.yaml: haystack, types of keys and values, and how many keys, values of each
# and keys that are asked for; RULER hides at least as many keys as it asks for.
RULER = {
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}
TYPES = {
    "words": r"[A-Za-z][A-Za-z -]*-[A-Za-z][A-Za-z -]*",
    "numbers": r"[1-9]\d{6}",
    "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
}
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
FRAME = re.compile(
    r"(?:A|Some) special magic (\w+) (?:is|are) hidden within the following text\. Make sure to "
    r"memorize it\. I will quiz you about the \1 afterwards\.\n(.*)\n"
    r"What (?:is|are all) the special magic \1 for (.+) mentioned in the provided text\?",
    re.DOTALL,
)


def check(problem: Problem, essay: Sequence[str]) -> None:
    """Reads a prompt as one who does not know how it was made."""
    haystack, keys, values, key_count, value_count, query_count = RULER[problem.kind]
    frame = FRAME.fullmatch(problem.prompt)
    assert frame
    asked_type, context, query = frame.groups()
    single = query_count * value_count == 1
    assert asked_type == (values[:-1] if single else values)
    assert problem.prompt.startswith("A " if single else "Some ")

    needle = rf"One of the special magic {values} for ({TYPES[keys]}) is: ({TYPES[values]})\."
    facts = re.findall(needle, context)
    asked = re.split(r", and |, ", query)
    assert len(asked) == query_count
    assert Counter(v for k, v in facts if k in asked) == Counter(problem.expected)
    assert len({value for _, value in facts}) == len(facts)
    assert len({key for key, _ in facts}) * value_count == len(facts)
    for key in asked:
        assert sum(found == key for found, _ in facts) == value_count

    if haystack == "needle":
        assert re.fullmatch(rf"({needle}\n)*[^\n]*", context + "\n")
        assert len(facts) > 10
        assert len({key for key, _ in facts}) == len(facts)
        return
    assert len(facts) == key_count * value_count
    rest = re.sub(rf"{needle}\s*", "", context)
    if haystack == "noise":
        lines = rest.split("\n")
        assert set(lines[:-1]) == {NOISE}
        assert NOISE.startswith(lines[-1])
    else:
        words = rest.split()
        assert words == list(islice(cycle(essay), len(words)))


def problems(tmp_path, kind: str, length=2000, limit=4) -> tuple[list[Problem], Sequence[str]]:
    settings = setting(tmp_path, chat_tokenizer(), (length,), limit)
    files = sorted((tmp_path / "haystack").glob("*.txt"))
    essay = " ".join(file.read_text() for file in files)
    return list(Ruler((kind,)).problems(settings)), essay.split()


@pytest.mark.parametrize("kind", RULER)
@pytest.mark.parametrize("length", [2000, 9000])  # within the essays, and more than they have
def test_needles_are_there_once_and_say_what_is_expected(tmp_path, kind, length):
    found, essay = problems(tmp_path, kind, length)
    for problem in found:
        check(problem, essay)
        assert problem.max_new_tokens == 128
    assert len({problem.prompt for problem in found}) == len(found)


def test_answers_start_as_rulers(tmp_path):
    [single], _ = problems(tmp_path, "niah_single_3", limit=1)
    key = re.findall("uuids for (.+?) is: ", single.prompt)[0]
    assert single.answer_start == (
        f" The special magic uuid for {key} mentioned in the provided text is"
    )
    [several], _ = problems(tmp_path, "niah_multiquery", limit=1)
    query = re.findall("What are all the special magic numbers for (.+) men", several.prompt)[0]
    assert re.fullmatch(r"[^,]+, [^,]+, [^,]+, and [^,]+", query)
    assert several.answer_start == (
        f" The special magic numbers for {query} mentioned in the provided text are"
    )


@pytest.mark.parametrize("kind", ["niah_single_1", "niah_single_2", "niah_multikey_2"])
def test_needles_lie_at_all_depths(tmp_path, kind):
    found, _ = problems(tmp_path, kind, limit=40)
    depths = [problem.prompt.index(problem.expected[0]) / len(problem.prompt) for problem in found]
    quarters = Counter(int(4 * depth) for depth in depths)
    assert all(quarters[quarter] >= 3 for quarter in range(4))


def test_lines_are_whole_where_the_length_allows_it(tmp_path):
    for kind in ("niah_single_1", "niah_multikey_2"):
        found, _ = problems(tmp_path, kind, length=8000)
        for problem in found:
            assert problem.prompt.split("\n")[-2].endswith((NOISE, "."))


@pytest.mark.parametrize("kind", ["niah_single_1", "niah_single_2", "niah_multikey_3"])
@pytest.mark.parametrize("twist", ["twice", "never", "other value"])
def test_a_wrong_generator_would_be_caught(tmp_path, monkeypatch, kind, twist):
    for name in ("_in_lines", "_in_essay"):
        right = getattr(needles, name)

        def wrong(hidden, *rest, right=right):
            text = right(hidden, *rest)
            again = {
                "twice": f"{hidden[0]}\n{hidden[0]}",
                "never": "",
                "other value": hidden[0].replace("is: ", "is: 1"),
            }
            return text.replace(hidden[0], again[twist])

        monkeypatch.setattr(needles, name, wrong)
    found, essay = problems(tmp_path, kind, limit=1)
    with pytest.raises(AssertionError):
        check(found[0], essay)
