import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkvq
from jkvq.attention.step_plan import Phase
from jkvq.cache.calibrated import Calibration, SideCalibration
from jkvq.cache.layout import empty_cache
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec import CacheSpec, OtherLayers, SideSpec
from jkvq.engine.forward import forward
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import abstract_params, logits
from tests.made_up import random_calibration
from tests.tiny import CONFIG, byte_tokenizer

PLAIN = SideSpec(32, "float")
TURNED = dataclasses.replace(PLAIN, rotation="oscar")
BALANCED = dataclasses.replace(PLAIN, rotation="balanced", center=True)
CENTRED = dataclasses.replace(PLAIN, center=True)
BOTH = dataclasses.replace(TURNED, center=True)
CALIBRATION = random_calibration(CacheShape.of(CONFIG))
STRETCHING = Calibration(
    SideCalibration(CALIBRATION.key.past_windows), SideCalibration(CALIBRATION.value.past_windows)
)


def model(config: ModelConfig) -> jkvq.Model:
    leaves, structure = jax.tree.flatten(abstract_params(config, jnp.float32))
    rng = np.random.default_rng(0)
    params = structure.unflatten(
        jnp.asarray(rng.normal(0, leaf.shape[-1] ** -0.5, leaf.shape), jnp.float32)
        for leaf in leaves
    )
    return jkvq.Model("tiny", config, params, byte_tokenizer())


def scores(llm: jkvq.LLM, phase: Phase) -> np.ndarray:
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 256, (2, 20)), jnp.int32)
    table = 1 + jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    cache = empty_cache(llm.spec, CacheShape.of(llm.config), 7, table)
    count = jnp.array([20, 13])
    hidden, _ = forward(llm.config, llm.params, llm.basis, cache, tokens, count, phase=phase)
    found = np.asarray(logits(llm.config, llm.params, hidden))
    return np.concatenate([found[0], found[1, :13]])  # the rest is padding


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("key", "value", "calibration"),
    [
        (TURNED, PLAIN, CALIBRATION),
        (PLAIN, TURNED, CALIBRATION),
        (CENTRED, CENTRED, CALIBRATION),
        (BOTH, BOTH, CALIBRATION),
        (BALANCED, BALANCED, STRETCHING),
    ],
    ids=["keys turned", "values turned", "centred", "all", "balanced"],
)
def test_rotation_and_centring_change_nothing_by_themselves(key, value, calibration, bias):
    config = dataclasses.replace(CONFIG, qk_bias=bias, v_bias=bias)
    plain = model(config)
    folded = jkvq.with_cache(plain, CacheSpec(key, value, page=8), calibration)
    for phase in ("prefill", "forced"):
        expected = scores(jkvq.with_cache(plain, "f32,page=8"), phase)
        np.testing.assert_allclose(scores(folded, phase), expected, atol=1e-5)


def test_sinks_read_zeros_when_values_are_centred():
    """What a query gives to its sinks it does not give to values, which are short of a mean."""
    plain = model(dataclasses.replace(CONFIG, sinks=True))
    folded = jkvq.with_cache(plain, CacheSpec(PLAIN, BOTH, page=8), CALIBRATION)
    expected = scores(jkvq.with_cache(plain, "f32,page=8"), "prefill")
    np.testing.assert_allclose(scores(folded, "prefill"), expected, atol=1e-5)
    assert np.abs(np.asarray(folded.basis.value.zero)).max() > 0.1  # it would show


def test_exact_layers_are_left_alone():
    plain = model(CONFIG)
    spec = CacheSpec(BOTH, BOTH, page=8, exact_layers=(0,))
    folded = jkvq.with_cache(plain, spec, CALIBRATION)
    kept = folded.params["layers"][0]["attention"]["qkv"]["weight"]
    assert kept is plain.params["layers"][0]["attention"]["qkv"]["weight"]
    # Layer 0 is stored in 16 bits, so only about the same.
    exact = jkvq.with_cache(plain, "f32,page=8")
    np.testing.assert_allclose(scores(folded, "forced"), scores(exact, "forced"), atol=0.05)
    assert np.abs(scores(folded, "prefill") - scores(exact, "prefill")).max() < 1e-5


@pytest.mark.parametrize("sides", [(BOTH, PLAIN), (PLAIN, BOTH)])
def test_layers_may_have_bases_of_their_own(sides):
    first, second = sides
    plain, others = model(CONFIG), (OtherLayers((1,), second, second),)
    spec = CacheSpec(first, first, page=8, other_layers=others)
    mixed = jkvq.with_cache(plain, spec, CALIBRATION)
    for phase in ("prefill", "forced"):
        expected = scores(jkvq.with_cache(plain, "f32,page=8"), phase)
        np.testing.assert_allclose(scores(mixed, phase), expected, atol=1e-5)


def test_a_folded_model_is_not_folded_again():
    folded = jkvq.with_cache(model(CONFIG), CacheSpec(BOTH, BOTH, page=8), CALIBRATION)
    with pytest.raises(jkvq.UserError, match=r"not LLM: give what jkvq\.load_model returns"):
        jkvq.with_cache(folded, "bf16")  # pyright: ignore
