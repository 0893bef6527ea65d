import dataclasses
import gzip

import pytest
from tokenizers.processors import TemplateProcessing

import jkvq
from jkvq.calibration import observe
from jkvq.evaluation.corpus import first_tokens, leading_tokens, read_text
from jkvq.loading.calibrate import Corpus
from tests.tiny import EOS, byte_tokenizer, model_of


def test_read_text_unpacks_gz_and_refuses_what_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("é")
    (tmp_path / "a.gz").write_bytes(gzip.compress("é".encode()))
    assert read_text(tmp_path / "a.txt") == read_text(tmp_path / "a.gz") == "é"
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"text" * 100)[:-9])
    (tmp_path / "damaged.gz").write_bytes(gzip.compress(b"text")[:10] + b"\xff" * 20)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("cut.gz", "damaged.gz", "binary"):
        with pytest.raises(jkvq.UserError, match=f"{name} cannot be read as UTF-8 text"):
            read_text(tmp_path / name)
    with pytest.raises(jkvq.UserError, match="there is no file"):
        read_text(tmp_path / "missing")


def test_first_tokens_of_a_short_text_is_refused(tiny):
    with pytest.raises(jkvq.UserError, match="10 tokens were asked for and the text has 5"):
        first_tokens(tiny.tokenizer, "Hello", 10)


def with_bos(llm: jkvq.LLM) -> jkvq.Model:
    """The same with a tokenizer that puts token 256 before every text, as Llama's does BOS."""
    tokenizer = byte_tokenizer()
    tokenizer.hf.backend_tokenizer.post_processor = TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", EOS)]
    )
    return dataclasses.replace(model_of(llm), tokenizer=tokenizer)


def test_texts_begin_as_prompts_do(tiny):
    llm = with_bos(tiny)
    assert leading_tokens(tiny.tokenizer) == []
    assert leading_tokens(llm.tokenizer) == [EOS]
    assert first_tokens(llm.tokenizer, "Hello", 6) == llm.tokenizer.encode("Hello")
    assert first_tokens(llm.tokenizer, "Hello", 3) == llm.tokenizer.encode("He")
    assert first_tokens(tiny.tokenizer, "Hello", 3) == tiny.tokenizer.encode("Hel")
    with pytest.raises(jkvq.UserError, match="7 tokens were asked for and the text has 6"):
        first_tokens(llm.tokenizer, "Hello", 7)


def test_every_sequence_of_a_calibration_begins_as_prompts_do(tiny, tmp_path, monkeypatch):
    """What the pass reads of a text, and of one that the model writes."""
    read = []

    def forward(config, params, windows, tokens, count, stand, **how):
        read.append(tokens[0, : int(count)].tolist())
        return real(config, params, windows, tokens, count, stand, **how)

    real = observe._observe_sequence
    monkeypatch.setattr(observe, "_observe_sequence", forward)
    text = "".join(chr(97 + i * i % 23) for i in range(300))
    for llm, leading in ((with_bos(tiny), [EOS]), (model_of(tiny), [])):
        read.clear()
        given = {"text": Corpus("squares", text), "tokens": 200, "window": 80, "method": "center"}
        jkvq.calibrate(llm, **given, out=tmp_path / f"text{len(leading)}")
        assert [part[: len(leading)] for part in read] == [leading] * 3
        behind = [token for part in read for token in part[len(leading) :]]
        assert leading + behind == first_tokens(llm.tokenizer, text, 200)
    read.clear()
    jkvq.calibrate(with_bos(tiny), self_written=True, tokens=64, out=tmp_path / "self")
    assert [part[0] for part in read] == [EOS]
