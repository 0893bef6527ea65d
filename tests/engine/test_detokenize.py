import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jkvq.engine.detokenize import TextStream
from jkvq.models.tokenizer import Tokenizer
from tests.tiny import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()


def _pieces(text: str, stop=()) -> tuple[list[str], bool]:
    stream, pieces = TextStream(TOKENIZER, stop), []
    for token in TOKENIZER.encode(text):
        stream.add([token])
        pieces.append(stream.take())
        if stream.stopped:
            break
    pieces.append(stream.finish())
    return pieces, stream.stopped


@given(st.text(min_size=1, max_size=30))
def test_pieces_add_up_to_the_text(text):
    pieces, stopped = _pieces(text)
    assert "".join(pieces) == text
    assert not stopped


def test_pieces_never_show_half_a_character():
    pieces, _ = _pieces("a😀é")
    assert [piece for piece in pieces if piece] == ["a", "😀", "é"]


def test_unfinished_bytes_at_the_end_are_shown_at_the_end():
    stream = TextStream(TOKENIZER)
    stream.add(TOKENIZER.encode("a😀")[:-1])
    assert stream.take() == "a"
    assert stream.finish() == "\ufffd"


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text, stop):
    pieces, stopped = _pieces(text, stop)
    # The first to be complete wins; of those complete at once, the one that begins first.
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stop)]
    if not ends:
        assert ("".join(pieces), stopped) == (text, False)
        return
    cut = min(text[: ends[0]].find(s) for s in stop if s in text[: ends[0]])
    assert ("".join(pieces), stopped) == (text[:cut], True)


@pytest.mark.parametrize(("text", "shown"), [("xyz EN", "xyz "), ("xyz E!", "xyz E!")])
def test_what_may_begin_a_stop_string_is_held_back(text, shown):
    stream = TextStream(TOKENIZER, ["END"])
    stream.add(TOKENIZER.encode(text))
    assert stream.take() == shown
    assert shown + stream.finish() == text


@given(
    st.text("abé😀", max_size=20),
    st.lists(st.text("abé", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(1, 9), min_size=20, max_size=80),
    st.data(),
)
def test_tokens_that_come_together_are_as_those_that_come_one_by_one(text, stop, sizes, data):
    tokens = TOKENIZER.encode(text)
    alone, taken = TextStream(TOKENIZER, stop), 0
    while taken < len(tokens) and not alone.stopped:
        taken += alone.add([tokens[taken]])
    together, start, shown = TextStream(TOKENIZER, stop), 0, ""
    for size in sizes:
        if start < len(tokens) and not together.stopped:
            start += together.add(tokens[start : start + size])
            if data.draw(st.booleans()):
                shown += together.take()
    while start < len(tokens) and not together.stopped:
        start += together.add(tokens[start:])
    assert (start, together.stopped) == (taken, alone.stopped)
    assert shown + together.finish() == alone.finish()


def test_nothing_is_decoded_before_somebody_reads(monkeypatch):
    decoded = []
    monkeypatch.setattr(
        "jkvq.models.tokenizer.Tokenizer.decode",
        lambda self, tokens: decoded.append(len(tokens)) or "a" * len(tokens),
    )
    stream = TextStream(TOKENIZER)
    for _ in range(5):
        stream.add([1, 2, 3])
    assert decoded == []
    assert stream.finish() == "a" * 15
    assert sum(decoded) == 15


NO_TEXT = [
    token for token in range(EOS) if TOKENIZER.decode([token]) == "\ufffd"
]  # half a character


@given(
    st.lists(st.sampled_from([*NO_TEXT[-9:], *TOKENIZER.encode("ab é😀"), EOS]), max_size=60),
    st.lists(st.integers(1, 9), min_size=1),
)
def test_pieces_of_any_tokens_add_up_to_their_text(tokens, sizes):
    stream, pieces, rest = TextStream(TOKENIZER), [], list(tokens)
    for size in itertools.cycle(sizes):
        stream.add(rest[:size])
        pieces.append(stream.take())
        if not (rest := rest[size:]):
            break
    assert "".join([*pieces, stream.finish()]) == TOKENIZER.decode(tokens)


@pytest.mark.parametrize("token", [NO_TEXT[-1], EOS], ids=["no character", "special"])
def test_tokens_without_text_are_not_read_again_and_again(token, monkeypatch):
    read, decode = [], TOKENIZER.decode
    monkeypatch.setattr(
        type(TOKENIZER), "decode", lambda _, tokens: read.append(len(tokens)) or decode(tokens)
    )
    stream = TextStream(TOKENIZER, ["stop"])
    for _ in range(50):
        stream.add([token] * 8)
        stream.take()
    assert max(read) < 40


def test_a_stop_string_is_found_before_what_is_no_text():
    stream, tokens = TextStream(TOKENIZER, ["STOP"]), TOKENIZER.encode("xSTOP")
    assert stream.add([*tokens, *[NO_TEXT[-1]] * 5]) == len(tokens)
    assert stream.stopped and stream.take() == "x"


@pytest.mark.parametrize("size", [1, 2, 8])
def test_tokens_may_end_within_characters_one_after_the_other(size):
    """One token is the last byte of a character and the first of the next, as Qwen's has some."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "\xa4\xed"]
    backend = Backend(models.BPE({name: n for n, name in enumerate(names)}, [("\xa4", "\xed")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), frozenset())
    text = "\ud5e4" * 9  # ed 97 a4
    tokens = tokenizer.encode(text)
    assert len(tokens) == 19
    stream, pieces = TextStream(tokenizer), []
    for start in range(0, len(tokens), size):
        stream.add(tokens[start : start + size])
        pieces.append(stream.take())
    assert "".join([*pieces, stream.finish()]) == text
