import dataclasses

import jax
import pytest

from jkvq.attention.implementation import choose_implementation
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.support.errors import UserError
from tests.tiny import CONFIG

WIDE = dataclasses.replace(CONFIG, head_dim=64, rope_divisors=(1.0,) * 32)


def test_the_kernels_are_chosen_where_there_is_a_gpu():
    best = "pallas" if jax.default_backend() == "gpu" else "reference"
    assert choose_implementation(None, WIDE, parse_spec("int4")) == best
    assert choose_implementation("reference", WIDE, parse_spec("int4")) == "reference"
    assert choose_implementation(None, CONFIG, parse_spec("int4")) == "reference"  # heads of 16


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU here")
def test_kernels_without_a_gpu_are_refused():
    with pytest.raises(UserError, match="implementation pallas needs an NVIDIA GPU"):
        choose_implementation("pallas", WIDE, parse_spec("int4"))


@pytest.mark.parametrize(
    ("cache", "changes", "sentence"),
    [
        ("int4", {"head_dim": 80}, "heads of 64, 128, 256 channels, and this model has 80"),
        ("int4", {"heads": 34, "kv_heads": 2}, "up to 16 query heads per KV head.* has 17"),
        ("int4,page=8", {}, "pages of 16 tokens or more, and page=8"),
        ("f32", {}, "16-bit floats, and key.bits=32"),
        ("tq-k4v4,value.bits=5", {}, "up to 4 bits, and value.bits=5"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(cache, changes, sentence):
    config = dataclasses.replace(WIDE, **changes)
    with pytest.raises(UserError, match=sentence):
        choose_implementation("interpret", config, parse_spec(cache))
    assert choose_implementation(None, config, parse_spec(cache)) == "reference"


def test_a_name_that_is_not_known_is_refused():
    with pytest.raises(UserError, match="implementation 'palas' is not known"):
        choose_implementation("palas", WIDE, parse_spec("int4"))
