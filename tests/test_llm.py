import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jkvq
from jkvq.cache.calibrated import Calibration
from jkvq.models.decoder import weight_bytes
from jkvq.models.formats.converted_folder import write_converted
from tests.tiny import CONFIG, model_of, tiny_model


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


@pytest.mark.parametrize("tokens", [0, -5, "x"])
def test_a_pool_that_cannot_be_is_refused_with_a_cache_too(tiny, tokens):
    with pytest.raises(jkvq.UserError, match=f"pool_tokens={tokens!r}: a whole number, 1 or more"):
        jkvq.with_cache(model_of(tiny), "f32", pool_tokens=tokens)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cache": "bf17"}, "cache 'bf17' is not known: did you mean bf16"),
        ({"dtype": "float23"}, "dtype 'float23' is not known: did you mean float32"),
        ({"pool_tokens": 0}, "pool_tokens=0: a whole number, 1 or more"),
        ({"pool_tokens": "64"}, "pool_tokens='64': a whole number"),
        ({"pool_tokens": True}, "pool_tokens=True: a whole number"),
        ({"model": None}, "model=None: a short name, a folder, a .gguf file or a hub id"),
        ({"model": 5}, "model=5: a short name"),
        ({"model": ""}, "model='': a short name"),
        ({"cache": 4}, "cache=4: a name such as 'jkvq-int4' or a jkvq.CacheSpec"),
        ({"cache": b"int4"}, "cache=b'int4': a name"),
        ({"dtype": jnp.int32}, "dtype 'int32' is not known: "),
        ({"dtype": 4}, "dtype=4: allowed: float32, bfloat16, float16"),
        ({"calibration": 4}, "calibration=4: the folder of an artefact, or"),
        ({"calibration": "/nope"}, "/nope holds no calibration"),
        ({"calibration": "/nope", "cache": "bf16"}, "bf16 takes no calibration: leave it out, or"),
        ({"implementation": "cuda"}, "implementation 'cuda' is not known"),
        ({"implementation": 4}, "implementation '4' is not known"),
        ({"check": "no"}, "check='no': True or False"),
    ],
)
def test_load_with_bad_options_is_refused_before_anything_is_fetched(
    folder, monkeypatch, options, sentence
):
    if "model" not in options:
        monkeypatch.setattr("jkvq.loading.load.open_checkpoint", None)
    with pytest.raises(jkvq.UserError, match=sentence):
        jkvq.load(**{"model": folder, **options})


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.dtype("bfloat16"), "bfloat16"])
def test_a_dtype_may_be_jaxs_own(folder, dtype):
    llm = jkvq.load(folder, cache="bf16", dtype=dtype)
    assert llm.params["embedding"].dtype == jnp.bfloat16


def test_a_calibration_that_the_default_cache_would_not_look_at_is_refused(tiny, tmp_path):
    odd = dataclasses.replace(CONFIG, head_dim=18, rope_divisors=(1.0,) * 9)
    model = tiny_model(config=odd)
    write_converted(tmp_path / "odd", odd, model.params, model.tokenizer)
    with (
        pytest.warns(jkvq.CacheWarning, match="the cache is bf16"),
        pytest.raises(jkvq.UserError, match="bf16 takes no calibration"),
    ):
        jkvq.load(tmp_path / "odd", calibration=Calibration())


@pytest.mark.parametrize("cache", [4, None, b"int4"])
def test_with_cache_of_what_is_no_cache_is_refused(tiny, cache):
    with pytest.raises(jkvq.UserError, match=r"^cache=.*: a name such as 'jkvq-int4'"):
        jkvq.with_cache(model_of(tiny), cache)


def test_load_of_weights_larger_than_the_memory_is_refused(folder, monkeypatch):
    monkeypatch.setattr("jkvq.models.model.free_bytes", lambda: 1000)
    with pytest.raises(jkvq.UserError, match=r"weights take .* KB and 1 KB are free"):
        jkvq.load(folder)
