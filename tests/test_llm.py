import jax
import jax.numpy as jnp
import pytest

import jkvq
from jkvq.models.decoder import weight_bytes
from jkvq.models.formats.converted_folder import write_converted
from tests.tiny import CONFIG


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_converted(path, CONFIG, tiny.params, tiny.tokenizer)
    return path


def test_load_gives_a_model_that_generates_the_same(tiny, folder):
    llm = jkvq.load(folder, cache="f32,page=8", dtype="float32")
    options = {"max_new_tokens": 10, "temperature": 1.0, "seed": 1}
    assert jkvq.generate(llm, "Hi", **options).tokens == jkvq.generate(tiny, "Hi", **options).tokens


def test_load_in_bfloat16_takes_half_the_memory(folder):
    llm = jkvq.load(folder, cache="bf16", dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(llm.params)} == {jnp.dtype("bfloat16")}
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.params))
    assert stored == weight_bytes(CONFIG, jnp.bfloat16) == weight_bytes(CONFIG, jnp.float32) / 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cache": "bf17"}, "cache 'bf17' is not known: did you mean bf16"),
        ({"dtype": "float23"}, "dtype 'float23' is not known: did you mean float32"),
        ({"pool_tokens": 0}, "pool_tokens=0: at least 1"),
    ],
)
def test_load_with_bad_options_is_refused(folder, options, sentence):
    with pytest.raises(jkvq.UserError, match=sentence):
        jkvq.load(folder, **options)


def test_load_of_weights_larger_than_the_memory_is_refused(folder, monkeypatch):
    monkeypatch.setattr("jkvq.models.model.free_bytes", lambda: 1000)
    with pytest.raises(jkvq.UserError, match=r"weights take .* KB and 1 KB are free"):
        jkvq.load(folder)
