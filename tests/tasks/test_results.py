import json

import pytest

from jkvq.tasks.report import accuracy_figure, listed, overview, write_report
from jkvq.tasks.results import Column, results_of
from jkvq.tasks.scores import Score


def score(problem: str, part: str, value: float, text: str = "a text", **more) -> Score:
    given = {"kind": "", "ended": True, "context": 100, "tokens": 10, "expected": "1"}
    return Score(problem=problem, part=part, score=value, text=text, **(given | more))


SCORES = {
    "bf16": {
        "sums": [score("0", "", 1.0), score("0", "", 0.0), score("1", "", 1.0)],
        "words": [
            score("a", "64", 1.0, kind="one"),
            score("b", "64", 1.0, kind="two"),
            score("a", "256", 0.0, kind="one"),
        ],
    },
    "int4": {
        "sums": [
            score("0", "", 0.0, "a test", ended=False, tokens=40),
            score("0", "", 0.0),
            score("1", "", 1.0, "a"),
        ],
        "words": [
            score("a", "64", 0.0, kind="one"),
            score("b", "64", 1.0, kind="two", context=300),
            score("a", "256", 0.0, kind="one"),
        ],
    },
}


def found():
    return results_of(SCORES, lambda cache, context: context + len(cache), "bf16")


def test_results_count_problems_not_samples():
    results = found()
    assert list(results) == [Column("sums", ""), Column("words", "64"), Column("words", "256")]
    plain, packed = results[Column("sums", "")].values()
    assert (plain.problems, plain.accuracy.value, packed.accuracy.value) == (2, 0.75, 0.5)
    assert plain.difference is plain.same is plain.parted is None
    assert packed.difference is not None
    assert packed.difference.value == -0.25
    assert (packed.ended, packed.tokens) == (pytest.approx(2 / 3), 20)
    assert packed.same == pytest.approx(1 / 3)
    assert packed.parted == (4 + 1) / 2  # "a te" of "a test", and all of "a"
    assert results[Column("words", "64")]["int4"].bits == 200 + 4


def test_the_report_says_what_the_results_are(tmp_path):
    results = found()
    write_report(tmp_path, "A model", results, SCORES, "bf16")
    text = (tmp_path / "report.md").read_text()
    assert "| cache | sums | words 64 | words 256 | words, area |" in text
    assert "| bf16 | 75.0 | 100.0 | 0.0 | 50.0 |" in text
    assert "| int4 | 50.0 (-25.0) | 50.0 (-50.0) | 0.0 (+0.0) | 25.0 |" in text
    assert "| one 64 | 100.0 | 0.0 |" in text
    assert "## sums by kind" not in text
    listed = json.loads((tmp_path / "results.json").read_text())
    assert [(each["task"], each["part"], each["cache"]) for each in listed[:2]] == [
        ("sums", "", "bf16"),
        ("sums", "", "int4"),
    ]
    assert listed[1]["difference"][0] == -0.25
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert [row[0] for row in overview(results)] == ["cache", "bf16", "int4"]


def test_requests_that_failed_are_in_no_figure_and_on_neither_side(tmp_path):
    failed = {"error": "too long", "ended": False, "context": 0, "tokens": 0}
    scores = {
        "bf16": {
            "words": [
                score("a", "64", 0.0, "", **failed),
                score("b", "64", 1.0),
                score("c", "64", 0.0),
                score("a", "256", 0.0, "", **failed),
            ]
        },
        "int4": {
            "words": [
                score("a", "64", 1.0),
                score("b", "64", 0.0, "", **failed),
                score("c", "64", 1.0),
                score("a", "256", 1.0),
            ]
        },
    }
    results = results_of(scores, lambda cache, context: context, "bf16")
    short, long = (results[Column("words", length)] for length in ("64", "256"))
    assert [(each.problems, each.failed) for each in short.values()] == [(3, 1), (3, 1)]
    assert [each.accuracy.value for each in short.values()] == [0.5, 1.0]
    assert (short["bf16"].bits, short["bf16"].tokens, short["bf16"].ended) == (100, 10, 1)
    assert short["int4"].difference == (1.0, 1.0, 1.0)  # of c alone
    assert (long["int4"].difference, long["int4"].same) == (None, None)
    write_report(tmp_path, "A model", results, scores, "bf16")
    text = (tmp_path / "report.md").read_text()
    assert "| bf16 | 50.0, 1 failed | 1 failed |  |" in text
    assert "| int4 | 100.0 (+100.0), 1 failed | 100.0 | 100.0 |" in text
    assert "| bf16 |  |  |  |  |  |  |  | 1 |" in text
    assert "nan" not in text
    first, *_, last = json.loads((tmp_path / "results.json").read_text())
    assert (first["failed"], last["failed"]) == (1, 0)
    assert listed(results)[2]["accuracy"] is None


def test_the_picture_has_a_panel_for_each_column_and_no_other():
    results = found()
    one = next(iter(results.values()))
    five = {Column(f"task {number}", ""): one for number in range(5)}
    assert [axes.get_title() for axes in accuracy_figure(five, "").axes] == [
        f"task {number}" for number in range(5)
    ]
    lines = accuracy_figure(results, "").axes[0].containers
    assert [each.get_label() for each in lines] == ["bf16", "int4"]
