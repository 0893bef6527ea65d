"""Files of requests and of answers: their lines, and going on where a run was stopped."""

import dataclasses
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import jkvq
from jkvq.jobs.batch import Answer, Window
from jkvq.jobs.job import Job, Tally, open_job, run_jobs
from jkvq.support.progress import Bar
from tests.tiny import byte_tokenizer

PROMPTS = [{"prompt": f"Prompt {index}"} for index in range(6)]
SAMPLED: list[Any] = [{**each, "temperature": 1.0} for each in PROMPTS]


class Files:
    """A file of requests and one of answers."""

    def __init__(self, folder: Path, llm: jkvq.LLM):
        self.requests, self.out = folder / "requests.jsonl", folder / "answers.jsonl"
        self._llm = llm

    def write(self, lines: list[Any]) -> None:
        self.requests.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def open(self, **options):
        return open_job(self.requests, self.out, max_new_tokens=3, **options)

    def run(self, **options) -> tuple[Job, Tally]:
        with self.open(**options) as job:
            return job, run_jobs([job], Window(self._llm, slots=2).answers, "tiny")

    def answers(self) -> dict[int, Any]:
        """By line; each is there once."""
        found = [json.loads(line) for line in self.out.read_text().splitlines()]
        assert set(Counter(each["line"] for each in found).values()) <= {1}
        return {each["line"]: each for each in sorted(found, key=lambda each: each["line"])}


@pytest.fixture
def files(tmp_path, tiny) -> Files:
    return Files(tmp_path, tiny)


def test_answers_have_the_form_of_their_requests(files):
    completion = {"prompt": "Hi", "max_tokens": 2, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    files.write(
        [
            {"prompt": "Hello", "id": 5},
            {"prompt": ""},
            {"custom_id": "a", "url": "/v1/completions", "body": completion},
            {"custom_id": "a", "url": "/v1/chat/completions", "body": chat},
        ]
    )
    job, tally = files.run()
    assert (job.total, job.kept, job.errors) == (4, 0, 2)
    assert (tally.read, tally.written) == (7, 5)
    found = files.answers()
    text, seed = found[1].pop("text"), found[1].pop("seed")
    assert isinstance(text, str) and isinstance(seed, int)
    counts = {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 0}
    assert found[1] == {
        **{"line": 1, "custom_id": 5, "finish_reason": "length", "error": None},
        **counts,
    }
    sentence = "the prompt is empty: give at least one word"
    assert found[2] == {"line": 2, "text": None, "error": sentence}
    body = found[3]["response"].pop("body")
    ours = {"line": 3, "id": "batch_req_3", "custom_id": "a"}
    response = {"status_code": 200, "request_id": "req_3"}
    assert found[3] == {**ours, "response": response, "error": None}
    assert body["object"] == "text_completion" and body["model"] == "tiny"
    assert body["choices"][0].keys() == {"index", "text", "logprobs", "finish_reason"}
    assert body["usage"] == {
        **{"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (found[4]["custom_id"], found[4]["response"]) == ("a", None)
    assert found[4]["error"]["code"] == "invalid_request"
    assert "no chat template" in found[4]["error"]["message"]


def test_log_probabilities_are_in_the_answers_to_those_who_ask(files):
    prompt = {"prompt": "Hi", "max_new_tokens": 2}
    files.write([prompt, {**prompt, "top_logprobs": 3}, {**prompt, "prompt_logprobs": True}])
    files.run()
    plain, tops, scored = files.answers().values()
    assert tops.keys() - plain.keys() == {"tokens", "logprobs", "top_logprobs"}
    assert scored.keys() - plain.keys() == {"prompt"}
    assert [max(each.values()) for each in tops["top_logprobs"]] == tops["logprobs"]  # greedy
    assert [int(next(iter(each))) for each in tops["top_logprobs"]] == tops["tokens"]
    assert [len(each) for each in scored["prompt"].values()] == [2, 2, 0]


def test_chats_are_answered_by_messages(tiny, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.hf.chat_template = "{% for m in messages %}{{ m['content'] }}!{% endfor %}"
    files = Files(tmp_path, dataclasses.replace(tiny, tokenizer=tokenizer))
    chat = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    files.write([{"custom_id": "a", "url": "/v1/chat/completions", "body": chat}, {"prompt": "Hi"}])
    files.run()
    found = files.answers()
    body = found[1]["response"]["body"]
    assert (body["id"], body["object"]) == ("chatcmpl-1", "chat.completion")
    message = {"role": "assistant", "content": found[2]["text"]}  # text is a chat by default
    assert body["choices"][0]["message"] == message
    assert body["usage"]["prompt_tokens"] == found[2]["prompt_tokens"] == 3


def test_a_stopped_run_goes_on_to_the_same_texts(files):
    files.write(SAMPLED)
    files.run()
    whole, lines = files.answers(), files.out.read_bytes().splitlines(keepends=True)
    files.out.write_bytes(b"".join(lines[:3]) + lines[3][:-1])  # killed in the middle of a write
    job, tally = files.run()
    assert (job.kept, tally.written) == (3, 9)
    assert files.out.read_bytes().startswith(b"".join(lines[:3]))
    assert files.answers() == whole
    with files.open() as job:
        assert (job.kept, job.total) == (6, 6)
    assert files.answers() == whole


@pytest.mark.parametrize("torn", [b"{", b'{"li', b'{"line": 1', b'{"line": 1, "text": "\xc3'])
def test_a_torn_last_line_is_cut_off(files, torn):
    files.write(PROMPTS[:2])
    files.out.write_bytes(b'{"line": 2, "error": null}\n' + torn)
    with files.open() as job:
        assert job.kept == 1
    assert files.out.read_bytes() == b'{"line": 2, "error": null}\n'


def test_errors_of_earlier_runs_are_answers_and_count(files):
    files.write(PROMPTS[:3])
    files.out.write_text('{"line": 2, "error": "no"}\n')
    with files.open() as job:
        assert (job.kept, job.errors) == (1, 1)


def test_errors_may_be_tried_again_and_what_comes_takes_their_place(files):
    files.write(PROMPTS[:2])
    lines = ['{"line": 2, "error": "no"}\n', '{"line": 1, "error": null}\n']
    files.out.write_text("".join(lines))
    with files.open(retry=True) as job:
        (asked,) = job.left()
        assert (asked.index, job.kept, job.errors) == (1, 1, 1)
        job.keep(asked, Answer(1, None, None, "still no"), "tiny")
        assert files.out.read_text() == "".join(lines)
        run_jobs([job], Window(files._llm, slots=2).answers, "tiny")
        assert job.errors == 0
    assert files.out.read_text().startswith("".join(lines))
    for retry in (True, False):
        with files.open(retry=retry) as job:
            assert (job.kept, job.errors) == (2, 0)


def test_a_longer_file_of_requests_goes_on_too(files):
    files.write(PROMPTS[:2])
    files.run()
    files.write(PROMPTS[:3])
    assert files.run()[0].kept == 2
    assert list(files.answers()) == [1, 2, 3]


@pytest.mark.parametrize(
    "content",
    [
        '{"line": 7, "error": null}\n',
        '{"line": 0, "error": null}\n',
        '{"line": 3, "error": null}\n',  # which is blank
        '{"line": "1", "error": null}\n',
        '{"line": 1, "custom_id": "b", "error": null}\n',
        '{"line": 2, "custom_id": "a", "error": null}\n',
        '{"line": 2, "error": null}\n{"line": 2, "error": null}\n',
        '{"line": 2}\n',
        "5\n",
        "Dear diary,\ntoday",
        "today",
    ],
)
def test_a_file_of_something_else_is_refused_and_left_as_it_is(files, content):
    files.requests.write_text('{"prompt": "a", "custom_id": "a"}\n{"prompt": "b"}\n\n')
    files.out.write_text(content)
    with (
        pytest.raises(jkvq.UserError, match=r"answers no request of .*: name another file"),
        files.open(),
    ):
        pass
    assert files.out.read_text() == content


def test_bad_files_are_refused(files, tmp_path):
    with pytest.raises(jkvq.UserError, match=r"there is no file .*requests\.jsonl"), files.open():
        pass
    files.requests.write_text("\n \n")
    with pytest.raises(jkvq.UserError, match="has no requests: write one in each"), files.open():
        pass
    files.write(PROMPTS)
    files.out.symlink_to(files.requests)
    with pytest.raises(jkvq.UserError, match="is the file of requests: name another"), files.open():
        pass
    files.out = tmp_path
    with pytest.raises(jkvq.UserError, match="cannot be written: Is a directory"), files.open():
        pass


def test_two_jobs_do_not_write_one_file(files):
    files.write(PROMPTS)
    taken = pytest.raises(jkvq.UserError, match="another process writes")
    with files.open(), taken, files.open():
        pass
    with files.open():
        pass


def test_a_full_disk_ends_in_a_sentence(files, monkeypatch):
    files.write(PROMPTS)
    with files.open() as job, Path("/dev/full").open("ab", buffering=0) as full:
        monkeypatch.setattr(job._answers, "_file", full)
        with pytest.raises(jkvq.UserError, match="No space left on device; the answers so far"):
            run_jobs([job], Window(files._llm, slots=2).answers, "tiny")


def test_requests_are_sorted_by_how_they_begin_and_share_it(files):
    documents = [f"{name} " * 45 for name in ("first", "other", "third")]  # of 270 tokens
    files.write([{"prompt": document + str(index)} for index in range(4) for document in documents])
    with files.open() as job:
        order = [index % 3 for index, _ in job._requests.left(job._answers.done)]
        tally = run_jobs([job], Window(files._llm, slots=2).answers, "tiny")
    assert sum(a != b for a, b in pairwise(order)) == 2  # one after another
    shared = [each["cached_tokens"] for each in files.answers().values()]
    assert sorted(shared) == [0] * 3 + [256] * 9  # a chunk
    assert tally.cached == sum(shared)


def test_progress_says_how_fast_it_is_and_how_long_it_takes(monkeypatch):
    now = iter((100.0, 110.0, 110.0))
    monkeypatch.setattr("jkvq.support.progress.time.monotonic", lambda: next(now))
    bar = Bar("Answering", 100)
    bar.reach(40)  # in an earlier run
    bar.rename("Answering, 7 tokens/s")
    assert bar.line() == "Answering, 7 tokens/s: 40% ..."
    bar.advance(10)
    assert bar.line() == "Answering, 7 tokens/s: 50%, 0:00:50 left ..."
