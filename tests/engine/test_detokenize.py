import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkvq.engine.detokenize import TextStream
from tests.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()


def _pieces(text: str, stop=()) -> tuple[list[str], bool]:
    stream, pieces = TextStream(TOKENIZER, stop), []
    for token in TOKENIZER.encode(text):
        stream.add(token)
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
    for token in TOKENIZER.encode("a😀")[:-1]:
        stream.add(token)
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
    for token in TOKENIZER.encode(text):
        stream.add(token)
    assert stream.take() == shown
    assert shown + stream.finish() == text
