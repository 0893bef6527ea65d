"""MLA: what a cache of latents holds, which specs it can have, and what they cost."""

import dataclasses

import numpy as np
import pytest

import jkvq
from jkvq.attention.implementation import choose_implementation
from jkvq.cache.footprint import bits_per_element
from jkvq.cache.layout import stored_bytes
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.presets import PRESETS
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


# Bits and nats of docs/models.md
TABLE = {
    "bf16": (16.0, 1.4e-6),
    "int8": (8.8, 1.8e-5),
    "int4": (4.8, 0.0046),
    "saw-int4": (4.8, 0.0042),
    "int4,sink=64,recent=64": (9.6, 0.00065),
    "int3": (3.8, 0.024),
    "int3,sink=64,recent=64": (8.85, 0.0038),
    "int2": (2.8, 0.125),
    "int2,sink=64,recent=64": (8.1, 0.028),
}


@pytest.mark.slow
def test_the_table_of_latents_holds():
    model, tokens = tiny_model(config=MLA), np.random.default_rng(0).integers(0, 256, 512).tolist()
    subjects = {name: subject(model, name) for name in ("f32", *TABLE)}
    scores = compare(subjects, tokens, reference="f32")
    for name, (bits, kl) in TABLE.items():
        assert scores[name].bits_per_element == pytest.approx(bits, abs=0.01)
        assert scores[name].kl == pytest.approx(kl, rel=0.1), name


def test_latents_have_the_presets_that_leave_values_as_they_are():
    def served(name: str) -> bool:
        try:
            PRESETS[name].spec.check(layers=27, head_dim=64, context=32768, latent=512)
        except jkvq.UserError as error:
            if not name.startswith("bdr128"):
                assert "this model keeps latents (MLA), and this cache has" in str(error)
            return False
        return True

    plain, rotated = {"bf16", "f32", "int8", "int4", "int3", "int2"}, {"saw-int4"}
    rotated |= {"bdr16-k", "bdr32-k", "bdr64-k"}
    assert set(filter(served, PRESETS)) == plain | rotated


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
