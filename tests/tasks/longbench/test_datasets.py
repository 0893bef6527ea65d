import json
import string

import pytest

from jkvq.tasks.longbench.datasets import DATASETS


def test_prompts_and_lengths_take_as_many_characters_as_the_authors_files():
    # dataset2prompt.json and dataset2maxlen.json, as their authors write them
    prompts = {name: dataset.prompt for name, dataset in DATASETS.items()}
    lengths = {name: dataset.max_new_tokens for name, dataset in DATASETS.items()}
    assert len(json.dumps(prompts, indent=4, ensure_ascii=False)) == 4977
    assert len(json.dumps(lengths, indent=4)) == 459


def test_answers_may_be_as_long_as_the_authors_say():
    by_length: dict[int, set[str]] = {}
    for name, dataset in DATASETS.items():
        by_length.setdefault(dataset.max_new_tokens, set()).add(name)
    assert by_length == {
        32: {
            *("hotpotqa", "2wikimqa", "musique", "triviaqa", "passage_count"),
            *("passage_retrieval_en", "passage_retrieval_zh"),
        },
        64: {"multifieldqa_en", "multifieldqa_zh", "trec", "lsht", "lcc", "repobench-p"},
        128: {"narrativeqa", "qasper", "dureader", "samsum"},
        512: {"gov_report", "qmsum", "multi_news", "vcsum"},
    }


def test_prompts_keep_what_looks_like_a_slip():
    assert DATASETS["narrativeqa"].prompt.count(" asconcisely as you can") == 2
    assert "{context}\n\n Answer" in DATASETS["qasper"].prompt
    assert "all news. \n" in DATASETS["multi_news"].prompt
    for name in ("passage_count", "passage_retrieval_en"):
        assert DATASETS[name].prompt.endswith(" answer is: ")
    for name in ("lcc", "repobench-p"):
        assert DATASETS[name].prompt.endswith("Next line of code:\n")


@pytest.mark.parametrize("name", DATASETS)
def test_prompts_ask_for_what_a_line_has(name):
    fields = {field for _, field, _, _ in string.Formatter().parse(DATASETS[name].prompt) if field}
    summaries = {"gov_report", "multi_news", "vcsum", "passage_count", "lcc"}
    assert fields == ({"context"} if name in summaries else {"context", "input"})


def test_the_chat_template_and_the_first_line_are_for_whom_the_authors_say():
    plain = {name for name, dataset in DATASETS.items() if not dataset.chat}
    assert plain == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    first = {name for name, dataset in DATASETS.items() if dataset.first_line}
    assert first == {"trec", "triviaqa", "samsum", "lsht"}


def test_metrics_are_the_authors():
    by_metric: dict[str, set[str]] = {}
    for name, dataset in DATASETS.items():
        by_metric.setdefault(dataset.metric.__name__, set()).add(name)
    assert by_metric == {
        "qa_f1": {
            *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"),
            "triviaqa",
        },
        "qa_f1_zh": {"multifieldqa_zh"},
        "rouge": {"gov_report", "qmsum", "multi_news", "samsum"},
        "rouge_zh": {"dureader", "vcsum"},
        "classification": {"trec", "lsht"},
        "count": {"passage_count"},
        "retrieval": {"passage_retrieval_en"},
        "retrieval_zh": {"passage_retrieval_zh"},
        "code_similarity": {"lcc", "repobench-p"},
    }
