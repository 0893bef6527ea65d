import dataclasses

import numpy as np
import pytest

import jkvq
from jkvq.engine.prompt import as_batch, encode_prompt

BAD = [
    ("", "the prompt is empty"),
    (b"hello", "b'hello' is no prompt: give text, .*; decode bytes first"),
    (bytearray(b"a"), "is no prompt: .*; decode bytes first"),
    ([True, False], "True is no prompt"),
    ([1, True], "1 is no prompt"),
    (7, "7 is no prompt: give text"),
    (None, "None is no prompt"),
    ({"role": "user", "content": "Hi"}, "is no prompt: give text, a list of messages"),
    ([1.5], "1.5 is no prompt"),
    (np.array(3), "is no prompt"),
    (np.array([1.5]), "is no prompt"),
    ([["a", 1]], r"\['a', 1\] is no prompt"),
    ([[[1]]], "is no prompt"),
    ([[]], "the prompt is empty"),
    ([{"role": "user"}], "{'role': 'user'} is no message: role and content are needed, both text"),
    ([{"role": "user", "content": None}], "is no message"),
    ([{"role": "user", "content": [{"type": "image"}]}], "is no message"),
    ([1, 257], "token 257 is outside the vocabulary of 257 tokens"),
    ([-1], "token -1 is outside"),
    ([1] * 1024, "1024 tokens and the model's context is 1024"),
    ("caf\udce9", "the prompt is no valid Unicode at character 3: give UTF-8 text"),
]


def encoded(llm, prompts) -> list[list[int]]:
    return [encode_prompt(llm, prompt, chat=None) for prompt in as_batch(prompts)[0]]


@pytest.mark.parametrize(("prompts", "sentence"), BAD)
def test_what_is_no_prompt_is_refused(tiny, prompts, sentence):
    with pytest.raises(jkvq.UserError, match=f"^.{{0,80}}{sentence}"):
        encoded(tiny, prompts)


@pytest.mark.parametrize(
    ("prompts", "tokens"),
    [
        ([1, 2], [[1, 2]]),
        ((np.int64(1), 2), [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([[1], np.array([2, 3])], [[1], [2, 3]]),
    ],
)
def test_tokens_may_be_numpys(tiny, prompts, tokens):
    assert encoded(tiny, prompts) == tokens


def test_an_answer_start_stands_behind_the_template(tiny):
    template = "{{ messages[0]['content'] }}?{% if add_generation_prompt %} A:{% endif %}"
    hf = type(tiny.tokenizer.hf)(
        tokenizer_object=tiny.tokenizer.hf.backend_tokenizer, chat_template=template
    )
    llm = dataclasses.replace(tiny, tokenizer=dataclasses.replace(tiny.tokenizer, hf=hf))
    plain = hf.encode("Hi? A: {", add_special_tokens=False)
    assert encode_prompt(llm, "Hi", None, " {") == plain
    assert encode_prompt(llm, [{"role": "user", "content": "Hi"}], None, " {") == plain
    assert encode_prompt(llm, "Hi", False, " {") == llm.tokenizer.encode("Hi {")
    with pytest.raises(jkvq.UserError, match="answer_start goes with text and conversations"):
        encode_prompt(llm, [1, 2], None, " {")


class Silent:
    """A tokenizer that knows no character."""

    can_chat = False

    def encode(self, text: str) -> list[int]:
        return []


def test_a_text_of_no_tokens_is_refused(tiny):
    llm = dataclasses.replace(tiny, tokenizer=Silent())
    with pytest.raises(jkvq.UserError, match="the prompt 'Hi' has 0 tokens in this model's voc"):
        jkvq.generate(llm, "Hi")


def test_messages_that_the_template_refuses_are_refused_in_its_words(tiny):
    template = "{{ raise_exception('Roles must alternate') }}"
    hf = type(tiny.tokenizer.hf)(
        tokenizer_object=tiny.tokenizer.hf.backend_tokenizer, chat_template=template
    )
    llm = dataclasses.replace(tiny, tokenizer=dataclasses.replace(tiny.tokenizer, hf=hf))
    with pytest.raises(jkvq.UserError, match=r"chat template refuses .*: Roles must alternate"):
        encode_prompt(llm, [{"role": "user", "content": "Hi"}], chat=None)
