"""The tokenizer in a GGUF file's metadata.

transformers can build one too, but only where PyTorch is installed, and it splits digits wrongly
for some files (``smollm``). The rules of each ``tokenizer.ggml.pre`` are llama.cpp's.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as Backend

from jkvq.models.tokenizer import Tokenizer
from jkvq.support.errors import UserError

_CONTROL, _USER_DEFINED = 3, 4  # token types

# The metadata names one token that ends a text, and a model may have several: llama.cpp knows the
# others by what they are called, as far as they are control tokens.
_ENDS = {
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>"),
    *("<end_of_turn>", "<end_of_utterance>", "<EOT>", "<eos>", "</s>"),
}

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# tokenizer.ggml.pre -> how text is split before merging.
_SPLITS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "qwen2": _split(_QWEN2),
    "llama-bpe": _split(_LLAMA3),
    "tekken": _split(_TEKKEN),
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "tekken")  # a word in the vocabulary is not merged up to


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the ``tokenizer.*`` metadata describes."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 (takes a second)

    ggml = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = ggml.get("model")
    if kind not in ("gpt2", "llama"):
        raise UserError(f"GGUF tokenizer '{kind}' is not supported; supported: gpt2, llama")
    tokens: list[str] = ggml["tokens"]
    backend = _byte_level(ggml) if kind == "gpt2" else _sentence_piece(ggml)
    _add_whole_tokens(backend, ggml)

    def token(key: str) -> str | None:
        index = ggml.get(f"{key}_token_id")
        return None if index is None else tokens[index]

    bos = token("bos")
    begins = kind == "llama" or ggml.get("pre") in ("llama-bpe", "tekken")  # unless the file says
    if bos is not None and ggml.get("add_bos_token", begins):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, ggml["bos_token_id"])],
        )
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=token("eos"),
        unk_token=token("unknown"),
        pad_token=token("padding"),
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
    return Tokenizer(hf, _stop_tokens(ggml))


def _stop_tokens(ggml: Mapping[str, Any]) -> frozenset[int]:
    """What the metadata names, and every control token of the vocabulary that is known to end."""
    named = {ggml.get(f"{key}_token_id") for key in ("eos", "eot", "eom")} - {None}
    known = {
        index
        for index, (token, kind) in enumerate(
            zip(ggml["tokens"], ggml.get("token_type", ()), strict=False)
        )
        if kind == _CONTROL and token in _ENDS
    }
    return frozenset(named | known)


def _byte_level(ggml: Mapping[str, Any]) -> Backend:
    """Byte-level BPE, as GPT-2 and its heirs have it."""
    pre = ggml.get("pre", "none given")
    if pre not in _SPLITS:
        raise UserError(
            f"GGUF pre-tokenizer '{pre}' is not supported; supported: {', '.join(_SPLITS)}"
        )
    backend = Backend(
        models.BPE(
            vocab={token: index for index, token in enumerate(ggml["tokens"])},
            merges=[tuple(merge.split(" ")) for merge in ggml["merges"]],
            ignore_merges=pre in _WHOLE_WORDS_FIRST,
        )
    )
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _SPLITS[pre]
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(ggml: Mapping[str, Any]) -> Backend:
    """SentencePiece BPE: merges follow from the scores of the tokens."""
    tokens, scores = ggml["tokens"], ggml["scores"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [
        (scores[index], -vocab[token[:cut]], -vocab[token[cut:]], token[:cut], token[cut:])
        for token, index in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges.sort(reverse=True)
    unknown = tokens[ggml.get("unknown_token_id", 0)]
    backend = Backend(
        models.BPE(
            vocab=vocab,
            merges=[merge[3:] for merge in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = "\u2581"
    prefix = ggml.get("add_space_prefix", True)
    backend.normalizer = normalizers.Sequence(
        ([normalizers.Prepend(space)] if prefix else []) + [normalizers.Replace(" ", space)]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if prefix else [])
    )
    return backend


def _add_whole_tokens(backend: Backend, ggml: Mapping[str, Any]) -> None:
    """Control and user-defined tokens are matched whole, before any splitting."""
    typed = list(zip(ggml["tokens"], ggml.get("token_type", ()), strict=False))
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, t in typed if t == _CONTROL]
    )
    backend.add_tokens(
        [AddedToken(token, normalized=False) for token, t in typed if t == _USER_DEFINED]
    )
