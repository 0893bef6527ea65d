# ruff: noqa: RUF001 (Chinese punctuation is meant)
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from jkvq import UserError
from jkvq.models.formats.gguf_file import GGUFFile
from jkvq.models.tokenizer import Tokenizer
from jkvq.tasks.longbench.longbench import LongBench
from jkvq.tasks.task import Problem, Setting, Task
from tests.tiny import byte_tokenizer

TASK: Task = LongBench()


def _setting(data: Path, limit: int | None = None, context: int = 4096) -> Setting:
    return Setting(byte_tokenizer(), context, data, (), limit, 0)


def _write(folder: Path, dataset: str, *lines: dict[str, Any], packed: bool = False) -> None:
    text = "".join(json.dumps(_line(dataset, **line)) + "\n" for line in lines).encode()
    path = folder / f"longbench_{dataset}.jsonl{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(text) if packed else text)


def _line(dataset: str, **changes: Any) -> dict[str, Any]:
    line = {"input": "Which?", "context": "Text.", "answers": ["this"], "length": 1}
    line |= {"dataset": dataset, "language": "en", "all_classes": None, "_id": "0"}
    return line | changes


def _scored(dataset: str, answers: list[str], answer: str, classes: list[str] | None = None):
    expected = {"answers": answers, "classes": classes, "dataset": dataset}
    return TASK.score(Problem("name", "prompt", expected, 32), answer)


def test_problems_are_those_of_the_files_that_are_there(tmp_path):
    _write(tmp_path, "triviaqa", {"_id": "a"}, {"_id": "b", "answers": ["x", "y"]})
    _write(tmp_path, "trec", {"all_classes": ["this", "that"]}, packed=True)
    (tmp_path / "longbench_other.jsonl").write_text("no JSON")
    found = list(TASK.problems(_setting(tmp_path)))
    assert [problem.name for problem in found] == ["trec/0", "triviaqa/a", "triviaqa/b"]
    assert found[0] == Problem(
        name="trec/0",
        prompt="Please determine the type of the question below. Here are some examples of "
        "questions.\n\nText.\nWhich?",
        expected={"answers": ["this"], "classes": ["this", "that"], "dataset": "trec"},
        max_new_tokens=64,
        kind="trec",
        chat=False,
    )
    assert found[2].expected == {"answers": ["x", "y"], "classes": None, "dataset": "triviaqa"}
    assert found[2].max_new_tokens == 32
    for problem in found:
        assert json.loads(json.dumps(problem.expected)) == problem.expected
    assert list(TASK.problems(_setting(tmp_path))) == found


def test_a_limit_is_of_each_dataset(tmp_path):
    for dataset in ("hotpotqa", "musique"):
        _write(tmp_path, dataset, *({"_id": str(i)} for i in range(3)))
    found = [problem.name for problem in TASK.problems(_setting(tmp_path, limit=2))]
    assert found == ["hotpotqa/0", "hotpotqa/1", "musique/0", "musique/1"]


def test_braces_of_a_document_stay(tmp_path):
    _write(tmp_path, "lcc", {"context": "f{input}{0}\n"})
    (problem,) = TASK.problems(_setting(tmp_path))
    assert problem.prompt == (
        "Please complete the code given below. \nf{input}{0}\nNext line of code:\n"
    )


def test_long_documents_lose_their_middle_to_the_answer(tmp_path):
    _write(tmp_path, "gov_report", {"context": "x" * 5000})
    (problem,) = TASK.problems(_setting(tmp_path, context=1024))
    assert len(problem.prompt) == 1024 - 512
    assert problem.prompt.startswith("You are given a report")
    assert problem.prompt.endswith("\n\nSummary:")


@pytest.mark.parametrize(("dataset", "frame"), [("hotpotqa", 6), ("triviaqa", 0)])
def test_the_chat_template_takes_room_where_it_is_used(tmp_path, dataset, frame):
    _write(tmp_path, dataset, {"context": "x" * 5000})
    setting = _setting(tmp_path, context=1024)
    setting.tokenizer.hf.chat_template = (
        "{% for m in messages %}<{{ m['content'] }}>{% endfor %}bot:"
    )
    (problem,) = TASK.problems(setting)
    assert len(problem.prompt) == 1024 - 32 - frame


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (None, "there is no longbench_DATASET.jsonl .* get them from .*zai-org/LongBench"),
        ([{"answers": []}], "longbench_trec.jsonl: answers of 0 is no list"),
        ([{"answers": "this"}], "longbench_trec.jsonl: answers of 0 is no list"),
        ([{"all_classes": None}], "longbench_trec.jsonl: all_classes of 0 is no list"),
        ([{"context": "x" * 5000}], "room for 0 tokens, too few for a prompt"),
    ],
)
def test_files_that_cannot_be_used_are_refused(tmp_path, lines, sentence):
    if lines is not None:
        _write(tmp_path, "trec", *({"all_classes": ["this"]} | line for line in lines))
    with pytest.raises(UserError, match=sentence):
        list(TASK.problems(_setting(tmp_path, context=64)))


def test_a_line_without_a_field_is_named(tmp_path):
    (tmp_path / "longbench_lcc.jsonl").write_text(json.dumps({"context": "x"}))
    with pytest.raises(UserError, match=r"longbench_lcc.jsonl, line 1, has no field 'input'"):
        list(TASK.problems(_setting(tmp_path)))


def test_the_best_gold_answer_counts():
    assert _scored("hotpotqa", ["cat", "black dog", "dog"], "A dog!") == 1
    assert _scored("hotpotqa", ["cat", "black dog"], "A dog!") == pytest.approx(2 / 3)
    assert _scored("hotpotqa", ["cat"], "") == 0


@pytest.mark.parametrize("dataset", ["triviaqa", "samsum", "trec", "lsht"])
def test_the_first_line_alone_counts_after_examples(dataset):
    classes = ["dog", "cat"] if dataset in ("trec", "lsht") else None
    whole = pytest.approx(1, abs=1e-7)
    assert _scored(dataset, ["dog"], "\n\ndog\nQuestion: cat", classes) == whole
    assert _scored(dataset, ["dog"], "cat\ndog", classes) == 0
    assert _scored(dataset, ["dog"], "", classes) == 0


def test_all_lines_count_elsewhere():
    assert _scored("hotpotqa", ["dog"], "cat\ndog") == pytest.approx(2 / 3)
    assert _scored("passage_count", ["7"], "12\n7") == 0.5
    assert _scored("lcc", ["x = 1"], "```\nx = 1\n```") == 1


@pytest.fixture(scope="module")
def shared_data() -> Path:
    folder = Path(__file__).parents[4] / "shared/data"
    if not (folder / "longbench_multifieldqa_zh.jsonl.gz").exists():
        pytest.skip(f"LongBench's files are not in {folder}")
    return folder


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_file) -> Tokenizer:
    return GGUFFile(smollm2_file).tokenizer()


def test_real_files_through_a_real_tokenizer(shared_data, smollm2_tokenizer):
    context = 4096
    setting = Setting(smollm2_tokenizer, context, shared_data, (), 4, 0)
    found = list(TASK.problems(setting))
    kinds = [problem.kind for problem in found]
    assert kinds.count("multifieldqa_zh") == kinds.count("passage_retrieval_zh") == 4
    for problem in found:
        if problem.kind == "multifieldqa_zh":
            assert problem.prompt.startswith("阅读以下文字并用中文简短回答：\n\n")
            assert problem.prompt.endswith("\n回答：")
        chat = smollm2_tokenizer.encode_chat([{"role": "user", "content": problem.prompt}])
        size = len(chat) + problem.max_new_tokens
        assert context - 8 <= size <= context  # the documents are longer
        gold = problem.expected["answers"][0]
        assert TASK.score(problem, gold) == 1
        assert TASK.score(problem, "") == 0


def test_real_documents_are_whole_in_a_long_context(shared_data, smollm2_tokenizer):
    setting = Setting(smollm2_tokenizer, 10**6, shared_data, (), 2, 0)
    name = "longbench_passage_retrieval_zh.jsonl.gz"
    with gzip.open(shared_data / name, "rt", encoding="utf-8") as file:
        line = json.loads(next(file))
    problem = next(p for p in TASK.problems(setting) if p.kind == "passage_retrieval_zh")
    assert problem.name == f"passage_retrieval_zh/{line['_id']}"
    assert line["context"] in problem.prompt
    assert line["input"] in problem.prompt
    assert TASK.score(problem, f"{line['answers'][0]}。") == 1
