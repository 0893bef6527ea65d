# ruff: noqa: RUF001 (Chinese punctuation is meant)
import pytest

from jkvq.tasks.longbench.normalize import normalized_chinese, normalized_english


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("The  Eiffel Tower,\n in PARIS!", "eiffel tower in paris"),
        ("a-b", "ab"),  # punctuation goes before articles, and leaves no space
        ("A theory, an antidote, a", "theory antidote"),
        ("don't", "dont"),
        ("a. an; the?", ""),
        ("...", ""),
        ("", ""),
        ("1,234.5", "12345"),
        ("naïve，“quoted”", "naïve，“quoted”"),  # only ASCII punctuation
    ],
)
def test_english(text, left):
    assert normalized_english(text) == left


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("厦门大学。", "厦门大学"),
        ("人民币 57081.86 元！", "人民币5708186元"),
        ("《红楼梦》", "《红楼梦"),  # the authors' list has the closing mark only
        ("The ABC", "theabc"),
        ("“…”——、，", ""),
        ("", ""),
    ],
)
def test_chinese(text, left):
    assert normalized_chinese(text) == left
