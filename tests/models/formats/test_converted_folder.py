import contextlib
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq import UserError
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params, abstract_params
from jkvq.models.families.architecture import from_hf
from jkvq.models.formats.converted_folder import MANIFEST, ConvertedFolder, write_converted
from jkvq.models.formats.gguf_tokenizer import tokenizer_from_gguf
from jkvq.models.tokenizer import Tokenizer
from tests.models.helpers import config_dict

CONFIG: ModelConfig = from_hf(config_dict("llama3"))
TEXT = "Hello<|end|> wörld 12"


def random_params(dtype) -> Params:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), dtype),
        abstract_params(CONFIG, dtype),
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes, a leading token, two stop tokens and a chat template."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    n = len(letters)
    return tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": [*letters, "<|start|>", "<|end|>", "<|turn|>"],
            "tokenizer.ggml.token_type": [*[1] * n, 3, 3, 3],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.bos_token_id": n,
            "tokenizer.ggml.eos_token_id": n + 1,
            "tokenizer.ggml.eot_token_id": n + 2,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}<|turn|>"
            "{% endfor %}",
        }
    )


@pytest.fixture
def converted(tmp_path, tokenizer) -> Path:
    folder = tmp_path / "converted"
    write_converted(folder, CONFIG, random_params(jnp.float32), tokenizer)
    return folder


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_params_come_back_bit_for_bit(tmp_path, tokenizer, dtype):
    params = random_params(dtype)
    write_converted(tmp_path / "new", CONFIG, params, tokenizer)
    loaded = ConvertedFolder(tmp_path / "new").params(dtype)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype(dtype)}
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_config_comes_back(converted):
    assert ConvertedFolder(converted).config == CONFIG


def test_tokenizer_comes_back(converted, tokenizer):
    loaded = ConvertedFolder(converted).tokenizer()
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    assert loaded.decode(loaded.encode(TEXT)) == "Hello wörld 12"
    assert loaded.stop_tokens == tokenizer.stop_tokens
    assert len(loaded.stop_tokens) == 2
    message = [{"role": "user", "content": "Hello"}]
    assert loaded.encode_chat(message) == tokenizer.encode_chat(message)


@pytest.mark.parametrize(
    ("stored", "asked"), [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)]
)
def test_params_are_cast_when_another_dtype_is_asked_for(tmp_path, tokenizer, stored, asked):
    params = random_params(stored)
    write_converted(tmp_path / "new", CONFIG, params, tokenizer)
    loaded = ConvertedFolder(tmp_path / "new").params(asked)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype(asked)}
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_array_equal(ours, theirs.astype(asked)),
        loaded,
        params,
    )


def test_folder_is_written_when_it_exists_and_is_empty(tmp_path, tokenizer):
    (tmp_path / "new").mkdir()
    write_converted(tmp_path / "new", CONFIG, random_params(jnp.float32), tokenizer)
    assert ConvertedFolder(tmp_path / "new").config == CONFIG


def test_folder_is_left_untouched_when_not_empty(tmp_path, tokenizer):
    target = tmp_path / "mine"
    target.mkdir()
    (target / "notes.txt").write_text("keep me")
    with pytest.raises(UserError, match="mine exists and is not empty"):
        write_converted(target, CONFIG, random_params(jnp.float32), tokenizer)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes.txt"]
    assert (target / "notes.txt").read_text() == "keep me"


def test_file_is_left_untouched(tmp_path, tokenizer):
    target = tmp_path / "mine.txt"
    target.write_text("keep me")
    with pytest.raises(UserError, match=r"mine\.txt exists"):
        write_converted(target, CONFIG, random_params(jnp.float32), tokenizer)
    assert target.read_text() == "keep me"


def test_nothing_is_left_behind_when_writing_fails(tmp_path, tokenizer, monkeypatch):
    def fail(self, folder):
        assert any(folder.parent.iterdir())  # the arrays are there by now
        raise OSError("disk full")

    monkeypatch.setattr(Tokenizer, "save", fail)
    with pytest.raises(UserError, match=r"new cannot be written: disk full$"):
        write_converted(tmp_path / "new", CONFIG, random_params(jnp.float32), tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_sentence(tmp_path, tokenizer, monkeypatch):
    params, usage = random_params(jnp.float32), shutil.disk_usage(tmp_path)
    with monkeypatch.context() as little:
        little.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
        with pytest.raises(UserError, match=r"it takes 2\d\d KB, and 10 KB are free there; make"):
            write_converted(tmp_path / "new", CONFIG, params, tokenizer)
    with pytest.raises(UserError, match=r"new cannot be written: File too large$"), short_files():
        write_converted(tmp_path / "new", CONFIG, params, tokenizer)
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def short_files():
    """No file may be longer than a few bytes: tensorstore fails while it writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path, tokenizer):
    (tmp_path / "file").write_text("no folder can be made in here")
    with pytest.raises(UserError, match=r"new cannot be written: \w"):
        write_converted(tmp_path / "file" / "new", CONFIG, random_params(jnp.float32), tokenizer)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: json.dumps({"format": 1}),
        lambda text: text.replace('"layers"', '"lairs"'),
    ],
    ids=["cut", "empty", "a list", "no config", "unknown field"],
)
def test_manifest_is_named_when_damaged(converted, damage):
    manifest = converted / MANIFEST
    manifest.write_text(damage(manifest.read_text()))
    with pytest.raises(UserError, match=r"jkvq\.json is damaged .*convert again"):
        ConvertedFolder(converted)


def array_files(folder: Path) -> list[Path]:
    """The files that hold the arrays' numbers, the largest first."""
    files = [path for path in (folder / "params").rglob("*") if path.is_file()]
    return sorted(files, key=lambda path: -path.stat().st_size)


# In a process of its own: when one read fails, orbax leaves the others unfinished, and they
# complain at any later time.
LOAD = """
import sys
from pathlib import Path
import jax.numpy as jnp
from jkvq import UserError
from jkvq.models.formats.converted_folder import ConvertedFolder

for folder in sys.argv[1:]:
    try:
        ConvertedFolder(Path(folder)).params(jnp.float32)
    except UserError as error:
        print(error)
"""


def test_folder_is_named_when_its_arrays_are_damaged(converted, tmp_path):
    folders = {
        name: Path(shutil.copytree(converted, tmp_path / name))
        for name in ("gone", "cut", "all gone", "another shape")
    }
    array_files(folders["gone"])[0].unlink()
    file = array_files(folders["cut"])[0]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    for file in array_files(folders["all gone"]):
        file.unlink()
    manifest = folders["another shape"] / MANIFEST
    manifest.write_text(manifest.read_text().replace('"mlp_width": 96', '"mlp_width": 128'))
    result = subprocess.run(
        [sys.executable, "-c", LOAD, *folders.values(), converted],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-1000:]
    messages = result.stdout.splitlines()  # none for the one that is whole
    for folder, message in zip(folders.values(), messages, strict=True):
        assert message.startswith(f"{folder} is damaged (")
        assert message.endswith("; convert again")


def test_float16_is_refused_where_it_does_not_hold_the_weights(tmp_path, tokenizer):
    params = random_params(jnp.float32)
    write_converted(tmp_path / "small", CONFIG, params, tokenizer)
    narrow = ConvertedFolder(tmp_path / "small").params(jnp.float16)
    np.testing.assert_array_equal(narrow["embedding"], params["embedding"].astype(jnp.float16))
    params["norm"]["weight"] = params["norm"]["weight"].at[0].set(1e6)
    write_converted(tmp_path / "large", CONFIG, params, tokenizer)
    with pytest.raises(UserError, match=r"'norm\.weight' holds numbers beyond 65,504"):
        ConvertedFolder(tmp_path / "large").params(jnp.float16)
