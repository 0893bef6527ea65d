"""Text to tokens and back, and the chat template."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jkvq.models.tools import told_in_text
from jkvq.support.errors import UserError

# transformers warns on import that it found no PyTorch; only its tokenizers are used here.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# One of these holds the vocabulary of a Hugging Face folder.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")

Message = dict[str, Any]  # {"role": "user", "content": "..."}


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with the tokens that end a text.

    stop_tokens: every token that the checkpoint says ends generation.
    """

    hf: "PreTrainedTokenizerFast"
    stop_tokens: frozenset[int]

    @property
    def can_chat(self) -> bool:
        return bool(self.hf.chat_template)

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text, with the leading token if this model's texts begin with one."""
        return list(self.hf.encode(text))

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template tells the model of tools."""
        return "tools" in str(self.hf.chat_template)

    def encode_chat(
        self,
        messages: Sequence[Message],
        answer_start: str = "",
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """Tokens of a conversation, up to where the assistant's next message goes on.

        tools: functions that the model may call, as OpenAI writes them. Calls are asked for as
            Qwen's and Hermes' templates do; a template with a way of its own is refused.
        """
        if not self.can_chat:
            raise UserError("this model has no chat template; give plain text (--raw, chat=False)")
        if tools and self.knows_tools and "<tool_call>" not in str(self.hf.chat_template):
            raise UserError(
                "tools: this model's chat template writes calls in a way that jkvq cannot read; "
                "models of Qwen's and Hermes' kind, and those that know no tools, can have them"
            )
        if not self.knows_tools:
            messages, tools = told_in_text(messages, tools), ()
        text = self.hf.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
        )
        return list(self.hf.encode(f"{text}{answer_start}", add_special_tokens=False))

    def encode_question(self, text: str, answer_start: str = "") -> list[int]:
        """Tokens of a user's text, in the chat template if there is one, and the answer's start."""
        if self.can_chat:
            return self.encode_chat([{"role": "user", "content": text}], answer_start)
        return self.encode(text + answer_start)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        return str(self.hf.decode(list(tokens), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        self.hf.save_pretrained(folder)
        stops = {"eos_token_id": sorted(self.stop_tokens)}
        (folder / "generation_config.json").write_text(json.dumps(stops) + "\n")


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder."""
    from transformers import AutoTokenizer  # noqa: PLC0415 (takes a second)

    # Where there is none transformers makes an empty one, to which every text is 0 tokens.
    if not any((folder / name).exists() for name in _VOCABULARIES):
        raise UserError(
            f"{folder} has no tokenizer ({', '.join(_VOCABULARIES[:-1])} or {_VOCABULARIES[-1]}); "
            "copy its files from where the model comes from"
        )
    try:
        hf = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{folder} has no usable tokenizer: {reason}") from None
    if len(hf.get_vocab()) <= len(hf.get_added_vocab()):
        raise UserError(
            f"{folder} has no usable tokenizer: it has special tokens only, none for text; "
            "copy its files from where the model comes from"
        )
    stops = {hf.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.exists():
            ids = json.loads(path.read_text()).get("eos_token_id")
            stops.update(ids if isinstance(ids, list) else [ids])
    return Tokenizer(hf, frozenset(stop for stop in stops if stop is not None))
