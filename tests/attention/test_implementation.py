import dataclasses
import types

import jax
import pytest

from jkvq.attention.implementation import choose_implementation
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.pallas_kernels.settings import compute_capability, has_gpu
from jkvq.support.errors import UserError
from tests.tiny import CONFIG

WIDE = dataclasses.replace(CONFIG, head_dim=64, rope_divisors=(1.0,) * 32)


def test_the_kernels_are_chosen_where_there_is_a_gpu():
    best = "pallas" if jax.default_backend() == "gpu" else "reference"
    assert choose_implementation(None, WIDE, parse_spec("int4")) == best
    assert choose_implementation("reference", WIDE, parse_spec("int4")) == "reference"
    assert choose_implementation(None, CONFIG, parse_spec("int4")) == "reference"  # heads of 16


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU here")
@pytest.mark.parametrize("name", ["pallas", "triton", "mosaic"])
def test_kernels_without_a_gpu_are_refused(name):
    with pytest.raises(
        UserError, match=rf"implementation {name}: .* NVIDIA GPU of .*, and there is none"
    ):
        choose_implementation(name, WIDE, parse_spec("int4"))


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


@pytest.mark.parametrize(("capability", "served"), [(8.9, False), (9.0, True)])
def test_heads_of_256_need_what_cudnn_needs(monkeypatch, capability, served):
    for module in ("jkvq.attention.implementation", "jkvq.pallas_kernels.settings"):
        monkeypatch.setattr(f"{module}.compute_capability", lambda: capability)
    config = dataclasses.replace(WIDE, head_dim=256, rope_divisors=(1.0,) * 128)
    chosen = choose_implementation(None, config, parse_spec("int4"))
    assert chosen == ("pallas" if served else "reference")
    if not served:
        with pytest.raises(UserError, match="below 9 cuDNN takes heads of 64 and 128"):
            choose_implementation("pallas", config, parse_spec("int4"))


def test_a_gpu_that_the_kernels_cannot_use_is_named(monkeypatch):
    for module in ("jkvq.attention.implementation", "jkvq.pallas_kernels.settings"):
        monkeypatch.setattr(f"{module}.compute_capability", lambda: 7.5)
    assert choose_implementation(None, WIDE, parse_spec("int4")) == "reference"
    with pytest.raises(UserError, match=r"capability 8 or more, and this one has 7\.5"):
        choose_implementation("pallas", WIDE, parse_spec("int4"))


@pytest.mark.parametrize("capability", [8.9, 10.0])
def test_mosaic_is_refused_where_it_was_never_run(monkeypatch, capability):
    for module in ("jkvq.attention.implementation", "jkvq.pallas_kernels.settings"):
        monkeypatch.setattr(f"{module}.compute_capability", lambda: capability)
    assert choose_implementation("triton", WIDE, parse_spec("int4")) == "triton"
    with pytest.raises(UserError, match=rf"9\.0 \(H100, H200\), and this one has {capability}"):
        choose_implementation("mosaic", WIDE, parse_spec("int4"))


@pytest.mark.parametrize(
    ("platform", "capability", "found"),
    [("gpu", "9.0", 9.0), ("gpu", "12.1", 12.1), ("gpu", "gfx942", 0.0), ("cpu", "9.0", 0.0)],
)
def test_compute_capability_is_that_of_nvidia_gpus(monkeypatch, platform, capability, found):
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert compute_capability() == found
    assert has_gpu() == (found >= 8)


def test_a_name_that_is_not_known_is_refused():
    with pytest.raises(UserError, match="implementation 'palas' is not known"):
        choose_implementation("palas", WIDE, parse_spec("int4"))
