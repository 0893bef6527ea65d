import itertools
import random

import pytest
from tokenizers import processors

from jkvq import UserError
from jkvq.models.tokenizer import Tokenizer
from jkvq.tasks.longbench.truncation import without_middle
from tests.tiny import EOS, byte_tokenizer

TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}</user>{% endfor %}<bot>"
FRAME = len("<user></user><bot>")


def _chat_tokenizer() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.hf.chat_template = TEMPLATE
    return tokenizer


def _longest_that_fits(prompt: str, room: int, frame: int) -> str:
    """All cuts of a text whose tokens are its bytes, tried one after the other."""
    raw = prompt.encode()
    if len(raw) + frame <= room:
        return prompt
    fitting = ""
    for half in range(1, len(raw) // 2 + 1):
        ends = [part.decode(errors="replace") for part in (raw[:half], raw[-half:])]
        if 2 * half + frame <= room and len("".join(ends).encode()) + frame <= room:
            fitting = "".join(ends)
    return fitting


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("letters", ["abc d\n", "ab段落é🙂"])
def test_prompts_keep_their_ends_as_far_as_they_fit(chat, letters):
    draw = random.Random(0)
    tokenizer = _chat_tokenizer()
    frame = FRAME if chat else 0
    for length, room in itertools.product([0, 1, 2, 7, 30, 31, 60], [12, 13, 20, 33, 34, 60]):
        prompt = "".join(draw.choices(letters, k=length))
        wanted = _longest_that_fits(prompt, room + frame, frame)
        assert without_middle(prompt, tokenizer, room + frame, chat) == wanted


def test_an_odd_room_leaves_out_a_token():
    assert without_middle("0123456789", byte_tokenizer(), 9, chat=False) == "01236789"
    assert without_middle("0123456789", byte_tokenizer(), 10, chat=False) == "0123456789"


def test_a_cut_through_a_character_does_not_take_more_room():
    # 段 is 3 bytes, and so is the mark for each part of one that is cut.
    found = without_middle("段" * 8, byte_tokenizer(), 16, chat=False)
    assert len(found.encode()) <= 16
    assert found.startswith("段段")
    assert found.endswith("段段")


def test_a_model_without_a_template_has_the_room_for_itself():
    prompt = "x" * 100
    assert without_middle(prompt, byte_tokenizer(), 50, chat=True) == "x" * 50
    assert without_middle(prompt, _chat_tokenizer(), 50, chat=True) == "x" * (50 - FRAME)
    assert without_middle(prompt, _chat_tokenizer(), 50, chat=False) == "x" * 50


def test_the_template_is_counted_before_the_cut(monkeypatch):
    cuts: list[int] = []
    decode = Tokenizer.decode
    monkeypatch.setattr(
        Tokenizer, "decode", lambda self, tokens: cuts.append(len(tokens)) or decode(self, tokens)
    )
    without_middle("x" * 100, _chat_tokenizer(), 50 + FRAME, chat=True)
    assert cuts == [25, 25]


def test_a_leading_token_is_one_of_the_first_half():
    tokenizer = _chat_tokenizer()
    tokenizer.hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", EOS)]
    )
    assert tokenizer.encode("01") == [EOS, *byte_tokenizer().encode("01")]
    assert without_middle("0123456789", tokenizer, 9, chat=False) == "0126789"
    assert without_middle("0123456789", tokenizer, 11, chat=False) == "0123456789"
    # The chat template has no leading token, so that the prompt is one token less there.
    assert without_middle("0123456789", tokenizer, 9 + FRAME, chat=True) == "012356789"


@pytest.mark.parametrize("room", [-64, 0, 1, FRAME, FRAME + 1])
def test_a_room_without_place_is_refused(room):
    with pytest.raises(UserError, match=f"room for {max(room, 0)} tokens, too few for a prompt"):
        without_middle("x" * 100, _chat_tokenizer(), room, chat=True)
