"""What takes long to import is imported where it is used, and not by everyone who uses jkvq."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.models.helpers import config_dict
from tests.tiny import byte_tokenizer

# Drawing, tokenizers, checkpoints of arrays and the formats of models: a second each, more or less.
SLOW = ("matplotlib", "transformers", "orbax", "tensorstore", "gguf", "huggingface_hub", "torch")


def imported_by(code: str) -> set[str]:
    """Which of `SLOW` a fresh Python has imported after ``code``."""
    tell = f"import sys; print(*(name for name in {SLOW} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{tell}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_import_brings_nothing_slow():
    assert imported_by("import jkvq.cli.main") == set()  # which imports jkvq first


def test_load_brings_the_tokenizer_s_library_only(tmp_path):
    write_model(tmp_path)
    code = f"import jkvq\njkvq.load({str(tmp_path)!r}, cache='bf16', check=False)"
    assert imported_by(code) - {"huggingface_hub", "torch"} == {"transformers"}  # which brings both


def test_imports_would_be_seen():
    assert imported_by("import matplotlib, gguf") >= {"matplotlib", "gguf"}


def write_model(folder: Path) -> None:
    """A random model in a Hugging Face folder, written without torch."""
    config = config_dict("llama-tied") | {"vocab_size": 257, "num_hidden_layers": 1}
    D, M, KV = 64, 96, 32
    shapes = {
        "embed_tokens": (257, D),
        "norm": (D,),
        "layers.0.input_layernorm": (D,),
        "layers.0.post_attention_layernorm": (D,),
        "layers.0.self_attn.q_proj": (D, D),
        "layers.0.self_attn.k_proj": (KV, D),
        "layers.0.self_attn.v_proj": (KV, D),
        "layers.0.self_attn.o_proj": (D, D),
        "layers.0.mlp.gate_proj": (M, D),
        "layers.0.mlp.up_proj": (M, D),
        "layers.0.mlp.down_proj": (D, M),
    }
    rng = np.random.default_rng(0)
    tensors = {
        f"model.{name}.weight": rng.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(folder)
