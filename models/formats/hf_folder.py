"""Checkpoints as Hugging Face keeps them: config.json, (sharded) safetensors, tokenizer files."""

import functools
import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params
from jkvq.models.families.architecture import FAMILIES, from_hf
from jkvq.models.formats.quantized.scheme import dequantizing
from jkvq.models.formats.weights import load_params
from jkvq.models.tokenizer import Tokenizer, tokenizer_from_folder
from jkvq.support.errors import UserError


class HFFolder:
    """A folder with config.json and safetensors files."""

    def __init__(self, folder: Path):
        self.folder = folder
        fields = _read_json(folder / "config.json")
        self.config: ModelConfig = from_hf(fields)
        self._files = _tensor_files(folder)
        family = FAMILIES[self.config.family]
        self._read = family.reading(dequantizing(fields, self._read_stored))

    def params(self, dtype) -> Params:
        family = FAMILIES[self.config.family]
        how = {"interleaved": family.interleaved}
        return load_params(self.config, dtype, family.all_names, self._read, **how)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_folder(self.folder)

    def _read_stored(self, name: str) -> np.ndarray:
        # Opened per tensor: pages of a mapped file count as memory until it is closed.
        with _open(self._files[name]) as file:
            if name not in file.keys():  # noqa: SIM118 (not a dict)
                raise KeyError(name)
            if file.get_slice(name).get_dtype() == "F8_E4M3":  # numpy itself has none
                return _read_float8(self._files[name], name)
            return file.get_tensor(name)


def read_config(path: Path) -> ModelConfig:
    """The architecture that a config.json describes; its weights need not be there."""
    return from_hf(_read_json(path))


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = {name: folder / file for name, file in _read_json(index)["weight_map"].items()}
        missing = sorted({path.name for path in files.values() if not path.exists()})
        if missing:
            raise UserError(f"{folder} lacks {', '.join(missing)}, which its index names")
        return files
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with _open(path) as file:
            files.update(dict.fromkeys(file.keys(), path))
    return files


def _open(path: Path):
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise UserError(f"{path} is truncated or damaged ({error}); fetch it again") from None


def _read_float8(path: Path, name: str) -> np.ndarray:
    """A tensor of 8-bit floats; the file's header says where it lies."""
    first, tensors = _header(path)
    start, end = tensors[name]["data_offsets"]
    raw = np.fromfile(path, np.uint8, count=end - start, offset=first + start)
    return raw.view(ml_dtypes.float8_e4m3fn).reshape(tensors[name]["shape"])


@functools.lru_cache(maxsize=4)
def _header(path: Path) -> tuple[int, dict]:
    """Where the tensors of a safetensors file begin, and where each of them lies from there."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        return 8 + size, json.loads(file.read(size))


def _read_json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}, which says what model it is") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON ({error}); fetch it again") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object; fetch it again")
    return found
