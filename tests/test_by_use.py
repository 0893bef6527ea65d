"""What a user has been seen to try, one sentence for each; most is refused where it belongs.

The tests beside the sources hold the rest: tests/engine/test_options.py and test_prompt.py,
tests/test_llm.py, tests/calibration/test_solve.py, tests/cli, tests/models/test_config.py.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jkvq
from tests.cli.running import run
from tests.models.helpers import config_dict
from tests.tiny import model_of

GENERATE = [
    (b"hello", {}, "b'hello' is no prompt"),
    ([True, False], {}, "True is no prompt"),
    ("a", {"top_k": 3_000_000_000}, "top_k=3000000000: "),
    ("a", {"stop_tokens": [2**40]}, "stop_tokens=1099511627776: "),
    ("a", {"max_new_tokens": "5"}, "max_new_tokens='5': "),
    ("a", {"max_new_tokens": 2.5}, "max_new_tokens=2.5: "),
    ("a", {"max_new_tokens": None}, "max_new_tokens=None: "),
    ("a", {"temperature": "0.5"}, "temperature='0.5': "),
    ("a", {"stop_tokens": 5}, "stop_tokens=5: "),
]


@pytest.mark.parametrize(("prompts", "options", "sentence"), GENERATE)
def test_generate_refuses(tiny, prompts, options, sentence):
    with pytest.raises(jkvq.UserError, match=f"^{sentence}"):
        jkvq.generate(tiny, prompts, **options)


def test_generate_takes_numpys_numbers_and_no_stop(tiny):
    given = {"temperature": np.float32(1.0), "max_new_tokens": np.int64(4)}
    found = jkvq.generate(tiny, "Hi", seed=np.int64(3), stop=None, **given)
    wanted = jkvq.generate(tiny, "Hi", jkvq.Options(4, temperature=1.0, seed=3))
    assert found.tokens == wanted.tokens
    json.dumps(found.seed)


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        (None, {}, "model=None: "),
        ("smollm2-135m", {"cache": 4}, "cache=4: "),
        ("smollm2-135m", {"cache": "int4,bits=2,bits=8"}, ".*bits is given twice"),
        ("smollm2-135m", {"cache": "bf16", "calibration": "/nope"}, "bf16 takes no calibration"),
        ("smollm2-135m", {"cache": "unheard-of"}, "cache 'unheard-of' is not known: .{,200}$"),
    ],
)
def test_load_refuses_before_anything_is_fetched(monkeypatch, model, options, sentence):
    monkeypatch.setattr("jkvq.models.formats.checkpoint._open_named", None)
    with pytest.raises(jkvq.UserError, match=f"^{sentence}"):
        jkvq.load(model, **options)


def test_calibrate_refuses(tiny, tmp_path):
    with pytest.raises(jkvq.UserError, match=r"^text='Once upon a time': there is no such file"):
        jkvq.calibrate(model_of(tiny), text="Once upon a time", out=tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("calibrate --method jkvq --centroids 4", "centroids=4: only with method kmeans"),
        ("caches --head-dim 0", "head_dim=0: at least 1"),
        ("caches --context 0", "context=0: at least 1"),
        ("caches --context -5", "context=-5: at least 1"),
        ("eval ppl --text text.txt --tokens -1", "tokens=-1: at least 1"),
        ("eval ppl --text text.txt --cache nope", "cache 'nope' is not known"),
        ("eval ppl --text text.txt --implementation cuda", "implementation 'cuda' is not known"),
        ("eval fidelity --text text.txt --tokens 0", "tokens=0: at least 1"),
        ("eval niah --haystack text.txt --trials 0", "trials=0: at least 1"),
        ("generate Hi -n 0", "max_new_tokens=0: "),
        ("generate Hi --top-k 3000000000", "top_k=3000000000: "),
    ],
)
def test_commands_refuse_before_anything_is_fetched(monkeypatch, tmp_path, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("Some prose.")
    monkeypatch.setattr("jkvq.models.formats.checkpoint._open_named", None)
    with pytest.raises(jkvq.UserError, match=f"^{sentence}"):
        run(*arguments.split())


@pytest.fixture
def folder(tmp_path) -> Path:
    """A Hugging Face folder with a config and a tensor, and without tokenizer files."""
    (tmp_path / "config.json").write_text(json.dumps(config_dict()))
    save_file({"model.norm.weight": np.ones(64, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_folder_without_a_tokenizer_is_refused(folder, monkeypatch):
    monkeypatch.setattr("jkvq.models.formats.hf_folder.HFFolder.params", lambda self, dtype: {})
    with pytest.raises(jkvq.UserError, match=f"^{folder} has no tokenizer .tokenizer.json"):
        jkvq.load(folder, cache="bf16", dtype=jnp.float32)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_hidden_layers", -2), ("hidden_size", "thirty"), ("max_position_embeddings", None)],
)
def test_a_folder_with_a_senseless_config_is_refused(folder, field, value):
    (folder / "config.json").write_text(json.dumps(config_dict() | {field: value}))
    with pytest.raises(jkvq.UserError, match=field):
        jkvq.load(folder)
