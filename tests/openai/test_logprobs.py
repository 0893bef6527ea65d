"""Log probabilities as answers have them."""

import pytest

from jkvq.engine.writer import Scores
from jkvq.openai.logprobs import Echo, Logprobs, echo_of
from tests.tiny import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()


@pytest.mark.parametrize(
    ("prompt", "text", "offsets"),
    [
        ("abc", "abc", [0, 1, 2]),
        ("Ün€<end>s", "Ün€<end>s", [0, 0, 1, 2, 2, 2, 3, 8]),
        ([EOS, *TOKENIZER.encode("Üs")], "Üs", [0, 0, 0, 1]),
    ],
)
def test_offsets_are_those_of_the_text_that_is_answered(prompt, text, offsets):
    tokens = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    echo = echo_of(TOKENIZER, text, tokens)
    assert (echo.text, echo.offsets) == (text, offsets)
    answer = [*TOKENIZER.encode("aÜb€"), EOS]
    logprobs = Logprobs("completion", TOKENIZER, echo)
    begun = logprobs.next(Scores([*tokens, *answer[:2]], [None] * (len(tokens) + 2)))
    ended = logprobs.next(Scores(answer[2:], [None] * 6))
    behind = [len(text) + place for place in (0, 1, 1, 2, 3, 3, 3, 4)]
    assert begun["text_offset"] + ended["text_offset"] == offsets + behind
    names = dict(zip(tokens, begun["tokens"], strict=False))
    assert ended["tokens"][-1] == names.get(EOS, "<end>") == "<end>"


def test_offsets_hold_in_long_texts_and_among_bytes_that_are_no_characters():
    text = "ab€Ü😀" * 30
    logprobs = Logprobs("completion", TOKENIZER, Echo())
    offsets = logprobs.next(Scores(TOKENIZER.encode(text)))["text_offset"]
    parts = [1, 1, 3, 2, 4] * 30  # tokens of each character
    assert offsets == [place for place, count in enumerate(parts) for _ in range(count)]
    broken = TOKENIZER.encode("€")[1:] * 30  # the ends of characters alone
    offsets = Logprobs("completion", TOKENIZER, Echo()).next(Scores(broken))["text_offset"]
    assert offsets == list(range(60))


@pytest.mark.parametrize("form", ["chat", "completion"])
def test_a_token_is_turned_into_text_once(form, monkeypatch):
    tokenizer, alone = byte_tokenizer(), []

    def decode(tokens, skip_special_tokens=False):
        if not skip_special_tokens:  # a name, and no piece of a text
            alone.extend(tokens)
        return "a"

    monkeypatch.setattr(tokenizer.hf, "decode", decode)
    for _ in range(3):
        tops = [{5: -0.1, 6: -0.2}, {6: -0.3, 7: -0.4}]
        Logprobs(form, tokenizer, Echo()).next(Scores([5, 6], [-0.1, -0.3], [*tops]))
    assert sorted(alone) == [5, 6, 7]
