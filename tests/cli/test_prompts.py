import json

import pytest

import jkvq
from jkvq.cli.prompts import given_prompts, read_prompts
from tests.cli.running import run


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffOne\r\n\n  Two \u2028 lines\nThree".encode())
    assert read_prompts(file) == ["One", "  Two \u2028 lines", "Three"]


def test_a_jsonl_file_has_text_or_messages_a_line(tmp_path):
    messages = [{"role": "user", "content": "Hi\nthere"}]
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "One\ntwo\u2028"}, {"messages": messages}]
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    assert read_prompts(file) == ["One\ntwo\u2028", messages]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"", "a.txt has no prompts: write one a line"),
        ("a.txt", b"\n \n", "a.txt has no prompts"),
        ("a.txt", b"\x93NUMPY", r"a.txt is no UTF-8 text \(at byte 0\): give text"),
        ("a.jsonl", b'{"prompt": "a"}\nHi', "a.jsonl, line 2 is no JSON .*: each line is"),
        ("a.jsonl", b'"Hi"', "line 1: each line is .* and nothing else"),
        ("a.jsonl", b'{"prompt": "a", "temperature": 1}', "and nothing else"),
        ("a.jsonl", b'{"text": "a"}', "and nothing else"),
        ("a.jsonl", b'{"prompt": 5}', "line 1: prompt is empty or of the wrong form"),
        ("a.jsonl", b'{"prompt": ""}', "prompt is empty"),
        ("a.jsonl", b'{"messages": "Hi"}', "messages is empty or of the wrong form"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "is no message: role and content"),
        ("a.jsonl", b'{"messages": [1, true]}', "is no prompt: give text"),
    ],
)
def test_a_file_without_prompts_is_refused_before_anything_is_fetched(
    tmp_path, monkeypatch, name, content, sentence
):
    monkeypatch.setattr("jkvq.loading.load.open_checkpoint", None)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(jkvq.UserError, match=sentence):
        run("generate", "--prompts", str(tmp_path / name))


def test_a_prompt_and_a_file_exclude_each_other(tmp_path):
    for prompt, file in ((None, None), ("Hi", tmp_path / "prompts.txt")):
        with pytest.raises(jkvq.UserError, match="give either a prompt or --prompts FILE"):
            given_prompts(prompt, file)
    with pytest.raises(jkvq.UserError, match=r"nowhere.txt cannot be read: No such file"):
        given_prompts(None, tmp_path / "nowhere.txt")
