"""MLA: what a cache of latents holds, which specs it can have, and what they cost."""

import dataclasses

import numpy as np
import pytest

import jkvq
from jkvq.attention.implementation import choose_implementation
from jkvq.cache.footprint import bits_per_element
from jkvq.cache.layout import stored_bytes
from jkvq.cache.shape import CacheShape
from jkvq.calibration.solve import CalibrationOptions, check_method
from jkvq.evaluation.perplexity import compare
from jkvq.evaluation.subjects import reconstruction, subject
from jkvq.models.config import Latent, ModelConfig
from tests.tiny import CONFIG, tiny_model

MLA: ModelConfig = dataclasses.replace(
    CONFIG,
    family="deepseek_v2",
    kv_heads=1,
    qk_norm=False,
    latent=Latent(width=64, key=24, value=16),
    score_scale=40**-0.5,
)
TOKENS = np.random.default_rng(0).integers(0, 256, 120).tolist()


def test_a_token_takes_its_latent_and_its_rotary_key():
    """DeepSeek-V2-Lite: 27 layers of 512 + 64 channels, not of 16 heads of 192 + 128."""
    shape = CacheShape(27, 1, 64, latent=512)
    spec = jkvq.parse_spec("bf16")
    assert stored_bytes(spec, shape, 1, 0) == spec.page * 27 * (512 + 64) * 2
    assert bits_per_element(spec, shape, 4096) == 16


def test_codes_of_latents_cost_the_more_the_fewer_bits_they_have():
    model = tiny_model(config=MLA)
    names = ["bf16", "int8", "int4", "saw-int4", "int2"]
    subjects = {name: subject(model, name) for name in ("f32", *names)}
    scores = compare(subjects, TOKENS, reference="f32")
    found = {name: score.kl or 0.0 for name, score in scores.items()}
    assert 0 < found["bf16"] < 1e-5 and found["int8"] < 1e-4
    assert found["int8"] < found["int4"] < found["int2"]
    assert found["saw-int4"] < found["int2"]


@pytest.mark.parametrize(
    ("cache", "sentence"),
    [
        ("jkvq-int4", r"keeps latents \(MLA\), and this cache has value\.rotation"),
        ("quarot-int2", r"value\.rotation, which they cannot have; use bf16, int8"),
        ("kmeans16-int4", "this cache has a calibration, which"),
    ],
)
def test_a_spec_that_latents_cannot_have_is_refused(cache, sentence):
    with pytest.raises(jkvq.UserError, match=sentence):
        jkvq.with_cache(tiny_model(config=MLA), cache)


def test_what_reads_keys_and_values_is_refused():
    model = tiny_model(config=MLA)
    for ask in (subject, reconstruction):
        with pytest.raises(jkvq.UserError, match="baselines and comparisons of layers read keys"):
            ask(model, "kivi-int2")
    with pytest.raises(jkvq.UserError, match="there is no calibration of those"):
        check_method("jkvq", CalibrationOptions(), MLA, 4096)
    with pytest.raises(jkvq.UserError, match=r"this model keeps latents \(MLA\); use reference"):
        choose_implementation("interpret", MLA, jkvq.parse_spec("bf16"))
