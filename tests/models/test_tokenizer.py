import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jkvq import UserError
from jkvq.models.tokenizer import Tokenizer, tokenizer_from_folder


def word_tokenizer() -> Tokenizer:
    words = {"hello": 0, "world": 1, "<eos>": 2, "<turn>": 3, "<unk>": 4}
    backend = Backend(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    return Tokenizer(hf, frozenset({2, 3}))


def test_tokenizer_is_the_same_when_saved_and_loaded(tmp_path):
    word_tokenizer().save(tmp_path)
    loaded = tokenizer_from_folder(tmp_path)
    assert loaded.encode("world hello there") == [1, 0, 4]
    assert loaded.stop_tokens == {2, 3}


@pytest.mark.parametrize(
    ("generation", "config", "stops"),
    [
        (None, None, {2}),  # the tokenizer's own
        ({"eos_token_id": [2, 3]}, {"eos_token_id": 1}, {1, 2, 3}),
        ({"eos_token_id": 3}, {}, {2, 3}),
        ({}, {"eos_token_id": None}, {2}),
    ],
)
def test_stop_tokens_come_from_every_file(tmp_path, generation, config, stops):
    word_tokenizer().hf.save_pretrained(tmp_path)
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps({"model_type": "llama", **content}))
    assert tokenizer_from_folder(tmp_path).stop_tokens == stops


@pytest.mark.parametrize("family", ["qwen2", "llama", None])
def test_folder_is_named_when_it_has_no_tokenizer(tmp_path, family):
    if family is not None:  # for some of them transformers makes a tokenizer without a vocabulary
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(UserError, match=f"{tmp_path} has no tokenizer .tokenizer.json, .*copy"):
        tokenizer_from_folder(tmp_path)


def test_folder_is_named_when_its_tokenizer_has_no_vocabulary(tmp_path):
    hf = PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE()), eos_token="<eos>")
    hf.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path} has no usable tokenizer: .*special tokens"):
        tokenizer_from_folder(tmp_path)


def test_folder_is_named_when_its_tokenizer_is_damaged(tmp_path):
    word_tokenizer().save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text()[:100])
    with pytest.raises(UserError, match=f"{tmp_path} has no usable tokenizer"):
        tokenizer_from_folder(tmp_path)
