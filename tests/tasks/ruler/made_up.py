"""Tokenizers, prose and settings for tests of problems that are made to measure."""

import functools
import random
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jkvq.models.formats.gguf_file import GGUFFile
from jkvq.models.tokenizer import Tokenizer
from jkvq.tasks.task import Problem, Setting

_CHAT = (
    "<s>{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}</s>\n"
    "{% endfor %}<|assistant|>\n"
)


def prose(words: int) -> str:
    """Sentences of 3 to 20 made-up words, in paragraphs."""
    chance = random.Random(1)
    text = []
    while sum(len(sentence.split()) for sentence in text) < words:
        sentence = " ".join(
            "".join(chance.choices("aeionrst", k=chance.randint(1, 9)))
            for _ in range(chance.randint(3, 20))
        )
        text.append(sentence.capitalize() + chance.choice(".?!") + chance.choice((" ", "\n\n")))
    return "".join(text)


@functools.cache
def chat_tokenizer() -> Tokenizer:
    """A small tokenizer with a chat template, of pieces of words as large models' are."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        show_progress=False,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = [
        Path(__file__).read_text(),
        "One of the special magic numbers for. The grass is green.",
    ]
    backend.train_from_iterator(texts, trainer)
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=_CHAT)
    return Tokenizer(hf, frozenset({1}))


@functools.cache
def tokenizer_of(file: Path) -> Tokenizer:
    return GGUFFile(file).tokenizer()


def setting(
    data: Path,
    tokenizer: Tokenizer,
    lengths: tuple[int, ...],
    limit: int | None = 3,
    seed: int = 0,
    context: int = 1 << 20,
) -> Setting:
    """Problems for a tokenizer; ``data`` gets a folder of essays if it has none."""
    haystack = data / "haystack"
    if not haystack.exists():
        haystack.mkdir()
        for name in ("one", "two"):
            (haystack / f"{name}.txt").write_text(prose(800))
    return Setting(tokenizer, context, data, lengths, limit, seed)


def size(problem: Problem, tokenizer: Tokenizer) -> int:
    """All tokens of a problem: of the prompt as a model gets it, and of the answer."""
    hf, text = tokenizer.hf, problem.prompt
    if tokenizer.can_chat:
        messages = [{"role": "user", "content": text}]
        text = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = hf.encode(f"{text}{problem.answer_start}", add_special_tokens=False)
    return len(tokens) + problem.max_new_tokens
