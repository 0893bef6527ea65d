"""GGUF files: any tensor type that the gguf package dequantizes."""

import dataclasses
import math
from pathlib import Path

import numpy as np
from gguf.quants import dequantize

from jkvq.models.config import ModelConfig, from_gguf
from jkvq.models.decoder import Params
from jkvq.models.formats.gguf_header import read_header
from jkvq.models.formats.gguf_tokenizer import tokenizer_from_gguf
from jkvq.models.formats.weights import load_params
from jkvq.models.tokenizer import Tokenizer

_NAMES = {
    "embedding": "token_embd.weight",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "blk.{layer}.attn_norm",
    "attention.q": "blk.{layer}.attn_q",
    "attention.k": "blk.{layer}.attn_k",
    "attention.v": "blk.{layer}.attn_v",
    "attention.o": "blk.{layer}.attn_output",
    "attention.q_norm": "blk.{layer}.attn_q_norm",
    "attention.k_norm": "blk.{layer}.attn_k_norm",
    "mlp_norm": "blk.{layer}.ffn_norm",
    "mlp.gate": "blk.{layer}.ffn_gate",
    "mlp.up": "blk.{layer}.ffn_up",
    "mlp.down": "blk.{layer}.ffn_down",
}


class GGUFFile:
    """A model in one GGUF file."""

    def __init__(self, path: Path):
        self.path = path
        self._header = read_header(path)
        config = from_gguf(
            self._header.metadata,
            {name: info.shape for name, info in self._header.tensors.items()},
        )
        if "rope_freqs.weight" in self._header.tensors:  # Llama 3's scaling, spelt out
            divisors = tuple(self._read("rope_freqs.weight").tolist())
            config = dataclasses.replace(config, rope_divisors=divisors)
        self.config: ModelConfig = config

    def params(self, dtype) -> Params:
        return load_params(self.config, dtype, _NAMES, self._read_rotate_half)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_gguf(self._header.metadata)

    def _read(self, name: str) -> np.ndarray:
        info = self._header.tensors[name]
        raw = np.fromfile(self.path, np.uint8, count=info.bytes, offset=info.offset)
        # It works on 16 rows at a time: fewer and longer ones take a third of the time.
        rows = math.prod(info.shape[:-1])
        return dequantize(raw.reshape(rows // math.gcd(rows, 32), -1), info.kind).reshape(
            info.shape
        )

    def _read_rotate_half(self, name: str) -> np.ndarray:
        """The tensor with rotary pairs as halves: llama files hold queries and keys interleaved."""
        tensor = self._read(name)
        heads = {"attn_q": self.config.heads, "attn_k": self.config.kv_heads}
        projection = name.split(".")[2] if name.startswith("blk.") else ""
        if self.config.family != "llama" or projection not in heads:
            return tensor
        pairs = tensor.reshape(heads[projection], self.config.head_dim // 2, 2, -1)
        return pairs.swapaxes(1, 2).reshape(tensor.shape)
