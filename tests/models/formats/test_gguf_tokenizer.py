import itertools
import json
import unicodedata
from pydoc_data.topics import topics
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from jkvq import UserError
from jkvq.models.formats.gguf_file import GGUFFile
from jkvq.models.formats.gguf_tokenizer import tokenizer_from_gguf
from jkvq.models.tokenizer import Tokenizer, tokenizer_from_folder

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

TEXTS = [
    "Hello world",
    " leading and trailing ",
    "   three spaces   between   words",
    "In 2024, 1234567 of 89.5% were 3x as fast; 12 34 567",
    "I'm sure they'll say it isn't, we've SEEN IT'S DON'T",
    "line one\nline two\n\n\nline five\r\n\ttabbed",
    "trailing newline\n",
    "naïve café, Straße, ÉCOLE",
    "cafe\u0301 decomposed",  # e and an accent apart
    "日本語のテキスト и русский العربية",
    "emoji 🙂👩‍👩‍👧 and ½ ² Ⅷ ٣",
    "camelCase snake_case path/to/file.py ((x+1)*2)!?...",
    "zqx zqxzqx",
    "",
]

# How each kind of model splits text, from the tokenizer.json of a model that has it.
SPLITS = {
    # openai-community/gpt2
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    # HuggingFaceTB/SmolLM2-135M
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
    # Qwen/Qwen2.5-0.5B
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # meta-llama/Meta-Llama-3-8B
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # mistralai/Mistral-Nemo-Base-2407
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def byte_level_reference(pre: str) -> tokenizers.Tokenizer:
    """A trained tokenizer that splits text as ``pre`` says.

    It is trained without splitting, so that its merges run over words, digits and lines: a split in
    another place gives other tokens. "zqx" is in its vocabulary, though no merges lead to it.
    """
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    train(trained, TEXTS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    vocab, merges = vocab_and_merges(trained)
    whole_words = pre in ("llama-bpe", "tekken")
    reference = tokenizers.Tokenizer(
        models.BPE(vocab={**vocab, "zqx": len(vocab)}, merges=merges, ignore_merges=whole_words)
    )
    split = SPLITS[pre]
    if isinstance(split, str):
        split = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    reference.pre_tokenizer = split
    if pre == "qwen2":
        reference.normalizer = normalizers.NFC()
    return reference


def train(tokenizer: tokenizers.Tokenizer, texts: list[str], **options: Any) -> None:
    texts = [text for text in texts if "zqx" not in text]
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False, **options)
    tokenizer.train_from_iterator(texts * 3, trainer)


def vocab_and_merges(tokenizer: tokenizers.Tokenizer) -> tuple[dict[str, int], list]:
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def byte_level_metadata(pre: str, **changes) -> dict[str, Any]:
    """The reference as GGUF holds it, with three control tokens and a user-defined one behind."""
    vocab, merges = vocab_and_merges(byte_level_reference(pre))
    words = sorted(vocab, key=lambda word: vocab[word])
    n = len(words)
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*words, "<|im_start|>", "<|im_end|>", "<|tool|>", "<think>"],
        "token_type": [*[NORMAL] * n, CONTROL, CONTROL, CONTROL, USER_DEFINED],
        "merges": [" ".join(merge) for merge in merges],
        "bos_token_id": n,
        "eos_token_id": n + 1,
        "add_bos_token": False,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def token_id(metadata: dict[str, Any], token: str) -> int:
    return metadata["tokenizer.ggml.tokens"].index(token)


@pytest.mark.parametrize("pre", SPLITS)
def test_byte_level_tokens_equal_the_trained_tokenizer_s(pre):
    reference, ours = byte_level_reference(pre), tokenizer_from_gguf(byte_level_metadata(pre))
    for text in TEXTS:
        assert ours.encode(text) == reference.encode(text).ids, text


@pytest.mark.parametrize("pre", SPLITS)
def test_byte_level_text_comes_back(pre):
    ours = tokenizer_from_gguf(byte_level_metadata(pre))
    for text in TEXTS:
        composed = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert ours.decode(ours.encode(text)) == composed


def test_byte_level_references_differ():
    """What makes the test above able to fail: no two kinds give the same tokens."""
    tokens = [
        [reference.encode(text).ids for text in TEXTS]
        for reference in map(byte_level_reference, SPLITS)
    ]
    assert all(one != other for one, other in itertools.combinations(tokens, 2))


def test_control_and_user_defined_tokens_are_matched_whole():
    metadata = byte_level_metadata("gpt-2")
    ours = tokenizer_from_gguf(metadata)
    tokens = ours.encode("<|im_start|>Hello<|tool|> <think>")
    start, tool, think = (
        token_id(metadata, token) for token in ("<|im_start|>", "<|tool|>", "<think>")
    )
    assert tokens == [start, *ours.encode("Hello"), tool, *ours.encode(" "), think]
    assert ours.decode(tokens) == "Hello <think>"  # control tokens are left out, others are text


@pytest.mark.parametrize(
    ("pre", "add_bos", "added"),
    [
        ("gpt-2", True, True),
        ("gpt-2", False, False),
        ("gpt-2", None, False),
        ("qwen2", None, False),
        ("smollm", None, False),
        ("llama-bpe", False, False),
        # llama.cpp adds it for these where the file says nothing, as Llama 3's files do.
        ("llama-bpe", None, True),
        ("tekken", None, True),
    ],
)
def test_bos_is_added_to_plain_text(pre, add_bos, added):
    metadata = byte_level_metadata(pre, add_bos_token=add_bos)
    bos = metadata["tokenizer.ggml.bos_token_id"]
    tokens = tokenizer_from_gguf(metadata).encode("Hello world")
    assert (tokens[0] == bos) == added
    assert tokens.count(bos) == added


def test_stop_tokens_are_all_that_the_file_names():
    metadata = byte_level_metadata("gpt-2", eos_token_id=7, eot_token_id=8, eom_token_id=9)
    end = token_id(metadata, "<|im_end|>")
    assert tokenizer_from_gguf(metadata).stop_tokens == {7, 8, 9, end}
    metadata["tokenizer.ggml.token_type"][end] = NORMAL  # a piece of text that looks like one
    assert tokenizer_from_gguf(metadata).stop_tokens == {7, 8, 9}


# Of a model: its pre-tokenizer, its control tokens, the eos token that its GGUF files name, and
# the eos tokens in its generation_config.json.
MODELS = {
    "Qwen/Qwen2.5-7B-Instruct": (
        "qwen2",
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|box_end|>", "<|vision_end|>"],
        "<|im_end|>",
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (
        "llama-bpe",
        ["<|begin_of_text|>", "<|end_of_text|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"],
        "<|eot_id|>",
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    ),
    "mistralai/Mistral-Nemo-Instruct-2407": (
        "tekken",
        ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"],
        "</s>",
        ["</s>"],
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_stop_tokens_equal_those_of_the_hugging_face_folder(tmp_path, model):
    pre, control, eos, listed = MODELS[model]
    metadata = byte_level_metadata(pre)
    words = [word for word in metadata["tokenizer.ggml.tokens"] if not word.startswith("<|im_")]
    metadata |= {
        "tokenizer.ggml.tokens": [*words, *control],
        "tokenizer.ggml.token_type": [NORMAL] * len(words) + [CONTROL] * len(control),
        "tokenizer.ggml.bos_token_id": None,
        "tokenizer.ggml.eos_token_id": len(words) + control.index(eos),
    }
    ours = tokenizer_from_gguf(metadata)
    ours.hf.save_pretrained(tmp_path)
    ids = [token_id(metadata, token) for token in listed]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert ours.stop_tokens == tokenizer_from_folder(tmp_path).stop_tokens


CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_chat_template_is_rendered_up_to_the_answer():
    metadata = byte_level_metadata("gpt-2", bos_token_id=5, add_bos_token=True)
    metadata["tokenizer.chat_template"] = CHATML
    ours = tokenizer_from_gguf(metadata)
    start, end = token_id(metadata, "<|im_start|>"), token_id(metadata, "<|im_end|>")
    plain = tokenizer_from_gguf(byte_level_metadata("gpt-2"))
    question, newline = plain.encode("user\nHello 12"), plain.encode("\n")
    assert ours.can_chat
    # The first token is the template's own, and the tokenizer adds no second one.
    assert ours.encode_chat([{"role": "user", "content": "Hello 12"}]) == [
        *[5, start, *question, end, *newline],
        *[start, *plain.encode("assistant\n")],
    ]


def test_chat_is_refused_when_there_is_no_template():
    ours = tokenizer_from_gguf(byte_level_metadata("gpt-2"))
    assert not ours.can_chat
    with pytest.raises(UserError, match="no chat template"):
        ours.encode_chat([{"role": "user", "content": "Hello"}])


def test_pre_tokenizer_is_refused_when_unknown():
    with pytest.raises(UserError, match=f"'chameleon'.*supported: {', '.join(SPLITS)}"):
        tokenizer_from_gguf(byte_level_metadata("gpt-2") | {"tokenizer.ggml.pre": "chameleon"})


@pytest.mark.parametrize("model", ["bert", None])
def test_tokenizer_is_refused_when_its_model_is_unknown(model):
    metadata = byte_level_metadata("gpt-2") | {"tokenizer.ggml.model": model}
    with pytest.raises(UserError, match=f"'{model}'.*supported: gpt2, llama"):
        tokenizer_from_gguf(metadata)


# SentencePiece

PROSE = [line for line in topics["class"].splitlines() if line]


@pytest.fixture(scope="module")
def piece_metadata() -> dict[str, Any]:
    """A small SentencePiece vocabulary: what is not ASCII is spelt in bytes."""
    trained = tokenizers.Tokenizer(models.BPE())
    train(trained, [line.replace(" ", "▁") for line in PROSE])
    vocab, merges = vocab_and_merges(trained)
    merged = ["".join(merge) for merge in merges]
    characters = [piece for piece in vocab if len(piece) == 1]
    special, spelt = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    fields = {
        "model": "llama",
        "pre": "default",
        "tokens": [*special, *spelt, *merged, *characters],
        # In order of merging, and characters last, as SentencePiece numbers them.
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(merged) + len(characters))],
        "token_type": [UNKNOWN, CONTROL, CONTROL]
        + [BYTE] * 256
        + [NORMAL] * (len(merged) + len(characters)),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def piece_tokens(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's rule: of all neighbours that make a piece, join the one that scores best."""
    ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores = metadata["tokenizer.ggml.scores"]
    pieces = list(text.replace(" ", "▁"))
    while True:
        joined = [left + right for left, right in itertools.pairwise(pieces)]
        places = [place for place, piece in enumerate(joined) if piece in ids]
        if not places:
            break
        best = max(places, key=lambda place: (scores[ids[joined[place]]], -place))
        pieces[best : best + 2] = [joined[best]]
    spelt = [[piece] if piece in ids else byte_pieces(piece) for piece in pieces]
    return [ids[piece] for pieces in spelt for piece in pieces]


def byte_pieces(character: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in character.encode()]


def test_pieces_follow_from_the_scores(piece_metadata):
    ours = tokenizer_from_gguf(piece_metadata)
    for text in [*filter(None, TEXTS), *PROSE]:
        assert ours.encode(text) == [1, *piece_tokens(piece_metadata, " " + text)], text


def test_pieces_equal_transformers(piece_metadata):
    pytest.importorskip("torch")
    integration = pytest.importorskip("transformers.integrations.gguf")
    names = {"model": "tokenizer_type"}
    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in piece_metadata.items()}
    theirs, _ = integration.convert_gguf_tokenizer(
        "llama", {names.get(key, key): value for key, value in fields.items()}
    )
    ours = tokenizer_from_gguf(piece_metadata)
    for text in TEXTS:
        if not text.startswith(" "):  # theirs adds no second space there; llama.cpp does
            assert ours.encode(text)[1:] == theirs.encode(text, add_special_tokens=False).ids


def test_pieces_come_back_as_text(piece_metadata):
    ours = tokenizer_from_gguf(piece_metadata)
    for text in TEXTS:
        assert ours.decode(ours.encode(text)) == text


def test_pieces_get_no_space_when_the_file_says_so(piece_metadata):
    metadata = piece_metadata | {"tokenizer.ggml.add_space_prefix": False}
    ours = tokenizer_from_gguf(metadata)
    for text in TEXTS:
        assert ours.encode(text) == [1, *piece_tokens(metadata, text)], text
        assert ours.decode(ours.encode(text)) == text


def test_control_pieces_are_matched_whole(piece_metadata):
    ours = tokenizer_from_gguf(piece_metadata)
    hello = piece_tokens(piece_metadata, " Hello")
    assert ours.encode("Hello</s>Hello") == [1, *hello, 2, *hello]


@pytest.mark.parametrize(("add_bos", "first"), [(None, [1]), (True, [1]), (False, [])])
def test_bos_is_added_to_pieces(piece_metadata, add_bos, first):
    metadata = dict(piece_metadata)
    if add_bos is not None:
        metadata["tokenizer.ggml.add_bos_token"] = add_bos
    tokens = tokenizer_from_gguf(metadata).encode("Hello")
    assert tokens == [*first, *piece_tokens(piece_metadata, " Hello")]


# The real SmolLM2


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_file) -> Tokenizer:
    return GGUFFile(smollm2_file).tokenizer()


def test_digits_are_split_one_by_one_in_smollm2(smollm2_tokenizer):
    tokens = smollm2_tokenizer.encode("1234567")
    assert [smollm2_tokenizer.decode([token]) for token in tokens] == list("1234567")


def test_words_are_whole_in_smollm2(smollm2_tokenizer):
    tokens = smollm2_tokenizer.encode("The capital of France")
    words = [smollm2_tokenizer.decode([token]) for token in tokens]
    assert words == ["The", " capital", " of", " France"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_from_smollm2(smollm2_tokenizer, text):
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text)) == text


def test_chat_ends_where_the_answer_begins_in_smollm2(smollm2_tokenizer):
    tokens = smollm2_tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    text = smollm2_tokenizer.hf.decode(tokens)
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    ends = smollm2_tokenizer.encode("<|im_end|><|endoftext|>")
    assert smollm2_tokenizer.stop_tokens == set(ends)
