"""GGUF files: any tensor type that the gguf package dequantizes."""

import dataclasses
import math
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize

from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params
from jkvq.models.families.architecture import from_gguf, gguf_family
from jkvq.models.families.family import Family
from jkvq.models.formats.gguf_header import read_header
from jkvq.models.formats.gguf_tokenizer import tokenizer_from_gguf
from jkvq.models.formats.weights import load_params
from jkvq.models.tokenizer import Tokenizer


class GGUFFile:
    """A model in one GGUF file."""

    def __init__(self, path: Path):
        self.path = path
        self._header = read_header(path)
        self._family = gguf_family(self._header.metadata)
        assert self._family.gguf is not None
        self._form = self._family.gguf
        config = from_gguf(
            self._header.metadata,
            {name: info.shape for name, info in self._header.tensors.items()},
        )
        self.config: ModelConfig = self._with_divisors(config)

    def params(self, dtype) -> Params:
        return load_params(
            self.config,
            dtype,
            gguf_names(self._family),
            self._read_as_decoder,
            interleaved=self._form.interleaved,
        )

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_gguf(self._header.metadata)

    def _with_divisors(self, config: ModelConfig) -> ModelConfig:
        """With the rope scaling that is spelt out in tensors: Llama 3's, and longrope."""
        metadata, start = self._header.metadata, f"{self._form.architecture}."
        original = metadata.get(f"{start}rope.scaling.original_context_length", config.context)
        length = "long" if config.context > original else "short"
        for name in ("rope_freqs.weight", f"rope_factors_{length}.weight"):
            if name in self._header.tensors:
                gain = metadata.get(f"{start}rope.scaling.attn_factor", config.rope_gain)
                divisors = tuple(self._read(name).tolist())
                return dataclasses.replace(config, rope_divisors=divisors, rope_gain=gain)
        return config

    def _read(self, name: str) -> np.ndarray:
        info = self._header.tensors[name]
        raw = np.fromfile(self.path, np.uint8, count=info.bytes, offset=info.offset)
        # It works on 16 rows at a time: fewer and longer ones take a third of the time.
        rows = math.prod(info.shape[:-1])
        return dequantize(raw.reshape(rows // math.gcd(rows, 32), -1), info.kind).reshape(
            info.shape
        )

    def _read_as_decoder(self, name: str) -> np.ndarray:
        """The tensor; norms without the 1 that the decoder adds."""
        tensor = self._read(name)
        return tensor - 1 if self._form.norms_with_one and name.endswith("norm.weight") else tensor


def gguf_names(family: Family) -> dict[str, str]:
    """The names of a family's tensors in llama.cpp's files, by the gguf package's table."""
    assert family.gguf is not None
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(architectures[family.gguf.architecture], 1)
    names = {}
    for ours, theirs in family.all_names.items():
        first = theirs.replace("{layer}", "0").replace(".{expert}", "")
        first = first.replace("e_score_correction_bias", "e_score_correction.bias")
        first = first.replace("self_attn.sinks", "self_attn.sinks.weight")
        found = table.get_name(first, try_suffixes=(".weight", ".bias"))
        if found is not None:
            names[ours] = found.replace("blk.0.", "blk.{layer}.")
    return names
