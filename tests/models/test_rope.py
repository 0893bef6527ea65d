"""Every kind of rope scaling against transformers."""

import math
from typing import Any

import numpy as np
import pytest

from jkvq import UserError
from jkvq.models.families.architecture import from_hf
from tests.models.helpers import LLAMA3_ROPE, config_dict
from tests.models.test_config import LLAMA31_ROPE

CONTEXT = 256
FACTORS = {
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + i for i in range(8)],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3_ROPE,
    "yarn": YARN,
    "yarn-qwen": {**YARN, "rope_theta": 1e6, "original_max_position_embeddings": 32768},
    "yarn-gpt-oss": {**YARN, "rope_theta": 150000.0, "truncate": False, "beta_fast": 24.0},
    "yarn-deepseek": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.3},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 64, **FACTORS},
    "longrope-short": {"rope_type": "longrope", "original_max_position_embeddings": 256, **FACTORS},
}


def ours(rope: dict[str, Any], head_dim: int = 16):
    rope = {"rope_theta": 10000.0, **rope}
    return from_hf({**config_dict(), "head_dim": head_dim, "rope_parameters": rope})


def theirs(rope: dict[str, Any], head_dim: int = 16, length: int = CONTEXT):
    """Frequencies of the pairs that turn, and the gain, by transformers."""
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )
    inverse, gain = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=length)
    return inverse.numpy(), gain


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [1.0, 0.5])
def test_frequencies_and_gain_equal_transformers(kind, part):
    head_dim = 16 if part == 1 else 32  # 8 pairs turn
    rope = {**KINDS[kind], "partial_rotary_factor": part}
    config = ours(rope, head_dim)
    frequency, gain = theirs(rope, head_dim)
    np.testing.assert_allclose(config.rope_frequency[:8], frequency, rtol=1e-5)
    np.testing.assert_array_equal(config.rope_frequency[8:], np.zeros(head_dim // 2 - 8))
    assert config.rope_gain == pytest.approx(gain, rel=1e-6)


@pytest.mark.parametrize("rope", [LLAMA3_ROPE, LLAMA31_ROPE], ids=["small", "llama-3.1"])
def test_each_branch_of_llama3_s_rule_is_met(rope):
    config = ours(rope, 128)
    frequency, _ = theirs(rope, 128)
    np.testing.assert_allclose(config.rope_frequency, frequency, rtol=1e-5)
    wavelength = 2 * math.pi * config.rope_theta ** (np.arange(64) / 64)
    original = rope["original_max_position_embeddings"]
    kept, slowed = wavelength < original / 4, wavelength > original
    assert kept.any() and slowed.any() and not (kept | slowed).all()


def test_yarn_keeps_fast_pairs_and_slows_the_others():
    divisors = np.asarray(ours(YARN, 128).rope_divisors)
    assert divisors[0] == 1 and divisors[-1] == 4 and ((divisors > 1) & (divisors < 4)).any()


@pytest.mark.parametrize(
    ("rope", "sentence"),
    [
        ({**YARN, "factor": -1}, "factor=-1: a model needs a positive number"),
        ({**KINDS["longrope"], "long_factor": [1.0]}, "long_factor of the rope .* 8 numbers"),
        ({**KINDS["longrope"], "long_factor": None}, "has no 'long_factor'"),
        ({**KINDS["longrope"], "long_factor": [1.0] * 7 + ["x"]}, "long_factor='x': "),
        ({"rope_type": "dynamic"}, "has no 'factor'"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2: of 16 channels an even"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor=2.0: "),
    ],
)
def test_senseless_field_is_named(rope, sentence):
    with pytest.raises(UserError, match=sentence):
        ours({"rope_type": "default", **rope})


def test_partial_rotary_is_the_same_when_spelt_as_before_transformers_5():
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5}
    old = {**config_dict(), "head_dim": 16, "partial_rotary_factor": 0.5}
    assert from_hf(old) == ours(rope)
