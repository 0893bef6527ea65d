import dataclasses
import json
from typing import Any

import pytest

from jkvq import UserError
from jkvq.models.config import ModelConfig, config_from_fields
from jkvq.models.families.architecture import FAMILIES, GGUF_FAMILIES, from_gguf, from_hf
from tests.models.helpers import LLAMA3_ROPE, config_dict

LLAMA31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GGUF_TENSORS = {"token_embd.weight": (97, 64), "output.weight": (97, 64)}


def gguf_metadata(**changes) -> dict[str, Any]:
    """The metadata of a small llama; a change to None removes a field."""
    fields = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 0.01,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    known = {f"llama.{key}": value for key, value in fields.items() if value is not None}
    return {"general.architecture": "llama", **known}


def test_from_hf_when_fields_are_left_out():
    config = config_dict()
    del config["num_key_value_heads"]
    assert from_hf(config) == ModelConfig(
        family="llama",
        layers=2,
        width=64,
        mlp_width=96,
        heads=4,
        kv_heads=4,
        head_dim=16,
        vocab=97,
        context=256,
        norm_eps=0.01,
        rope_theta=10000.0,
        rope_divisors=(1.0,) * 8,
    )


def test_from_gguf_when_fields_are_left_out():
    assert from_gguf(gguf_metadata(attention__head_count_kv=None), GGUF_TENSORS) == ModelConfig(
        family="llama",
        layers=2,
        width=64,
        mlp_width=96,
        heads=4,
        kv_heads=4,
        head_dim=16,
        vocab=97,
        context=256,
        norm_eps=0.01,
        rope_theta=10000.0,
        rope_divisors=(1.0,) * 8,
    )


@pytest.mark.parametrize("family", ["mamba", None])
def test_unsupported_architecture_names_the_supported_ones(family):
    with pytest.raises(UserError, match=f"'{family}'.*{', '.join(FAMILIES)}"):
        from_hf({**config_dict(), "model_type": family})
    with pytest.raises(UserError, match=f"'{family}'.*{', '.join(GGUF_FAMILIES)}"):
        from_gguf({**gguf_metadata(), "general.architecture": family}, GGUF_TENSORS)


def test_hidden_act_is_refused_when_not_silu():
    with pytest.raises(UserError, match=r"hidden_act='gelu'.*'silu'"):
        from_hf({**config_dict(), "hidden_act": "gelu"})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "axial", "factor": 4.0, "rope_theta": 10000.0}},
        {"rope_scaling": {"rope_type": "axial", "factor": 4.0}},
        {"rope_scaling": {"type": "axial", "factor": 4.0}},
    ],
)
def test_rope_scaling_is_refused_when_unknown(rope):
    with pytest.raises(UserError, match=r"'axial'.*supported: default, linear, dynamic, llama3"):
        from_hf({**config_dict(), **rope})


def test_rope_scaling_is_refused_when_unknown_in_gguf():
    metadata = gguf_metadata(rope__scaling__type="axial", rope__scaling__factor=4.0)
    with pytest.raises(UserError, match=r"'axial'.*supported: default, linear, dynamic, llama3"):
        from_gguf(metadata, GGUF_TENSORS)


@pytest.mark.parametrize("name", ["rope__scaling__factor", "rope__scale_linear"])
def test_a_rope_factor_without_a_type_is_linear_in_gguf(name):
    config = from_gguf(gguf_metadata(**{name: 4.0}), GGUF_TENSORS)
    typed = gguf_metadata(rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert set(config.rope_divisors) == {4.0} and config == from_gguf(typed, GGUF_TENSORS)


def test_missing_field_is_named():
    config = config_dict()
    del config["hidden_size"]
    with pytest.raises(UserError, match="hidden_size"):
        from_hf(config)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("num_hidden_layers", -2, "num_hidden_layers=-2: a model needs a whole number from 1 on"),
        ("hidden_size", "thirty", "hidden_size='thirty': a model needs a whole number from 1 on"),
        ("hidden_size", 64.0, "hidden_size=64.0: a model needs a whole number"),
        ("max_position_embeddings", None, "has no 'max_position_embeddings'"),
        ("num_attention_heads", 0, "num_attention_heads=0: "),
        ("num_attention_heads", 128, "head_dim=0: "),
        ("num_key_value_heads", 0, "num_key_value_heads=0: "),
        ("vocab_size", [97], "vocab_size=.97.: "),
        ("sliding_window", "no", "sliding_window='no': "),
        ("intermediate_size", True, "intermediate_size=True: "),
        ("rms_norm_eps", "small", "rms_norm_eps='small': a model needs a positive number"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps=nan: "),
        ("rope_theta", -1, "rope_theta=-1: "),
        ("rope_parameters", {"rope_type": "linear", "factor": "2"}, "factor='2': "),
        ("rope_parameters", {"rope_type": "linear"}, "has no 'factor'"),
        ("rope_parameters", {**LLAMA3_ROPE, "low_freq_factor": None}, "has no 'low_freq_factor'"),
    ],
)
def test_senseless_field_is_named(name, value, sentence):
    with pytest.raises(UserError, match=sentence):
        from_hf({**config_dict(), name: value})


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (
            "attention.head_count",
            0,
            r"llama\.attention\.head_count=0: a model needs a whole number",
        ),
        ("attention.head_count", [4, 4], r"head_count=\[4, 4\]: "),  # one for each layer
        ("block_count", -1, r"llama\.block_count=-1: "),
        ("embedding_length", "64", "embedding_length='64': "),
        ("rope.freq_base", 0.0, r"rope\.freq_base=0\.0: a model needs a positive number"),
        ("rope.scaling.type", "linear", "has no 'factor'"),
    ],
)
def test_senseless_field_is_named_in_gguf(name, value, sentence):
    with pytest.raises(UserError, match=sentence):
        from_gguf(gguf_metadata(**{name: value}), GGUF_TENSORS)


def test_missing_field_is_named_in_gguf():
    with pytest.raises(UserError, match=r"llama\.block_count"):
        from_gguf(gguf_metadata(block_count=None), GGUF_TENSORS)


def test_missing_embedding_is_named_in_gguf():
    with pytest.raises(UserError, match=r"token_embd\.weight"):
        from_gguf(gguf_metadata(), {"output.weight": (97, 64)})


TOLD = {"use_sliding_window": True, "sliding_window": 100}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, ()),
        ({"sliding_window": 100}, (100, 100)),
        ({"sliding_window": 256}, ()),  # no sequence is longer
        ({"sliding_window": None}, ()),
        ({"sliding_window": 100, "use_sliding_window": True}, (100, 100)),
        ({"sliding_window": 100, "use_sliding_window": False}, ()),
        ({"model_type": "qwen2", "sliding_window": 100}, ()),  # qwen only uses it when told to
        ({"model_type": "qwen2", "max_window_layers": 1, **TOLD}, (None, 100)),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention", "full"], **TOLD},
            (100, None),
        ),
    ],
)
def test_a_sliding_window_in_use_is_that_of_its_layers(changes, windows):
    config = from_hf({**config_dict(), **changes})
    assert (config.context, config.windows) == (256, windows)


@pytest.mark.parametrize(("window", "windows"), [(None, ()), (100, (100, 100)), (256, ())])
def test_a_sliding_window_in_gguf_is_that_of_all_layers(window, windows):
    config = from_gguf(gguf_metadata(attention__sliding_window=window), GGUF_TENSORS)
    assert (config.context, config.windows) == (256, windows)


def test_rope_is_the_same_when_spelt_as_before_transformers_5():
    scaling = {key: value for key, value in LLAMA31_ROPE.items() if key != "rope_theta"}
    old = {**config_dict(), "rope_theta": 500000.0, "rope_scaling": scaling}
    assert from_hf(old) == from_hf({**config_dict(), "rope_parameters": LLAMA31_ROPE})


def test_heads_are_refused_when_they_do_not_share_evenly():
    with pytest.raises(UserError, match="4 query heads do not share 3 KV heads"):
        from_hf({**config_dict(), "num_key_value_heads": 3})


def test_head_dim_is_refused_when_odd():
    with pytest.raises(UserError, match="head_dim=15"):
        from_hf({**config_dict(), "head_dim": 15})


@pytest.mark.parametrize(
    ("changes", "dense"),
    [({}, ()), ({"mlp_only_layers": [0, 2]}, (0, 2)), ({"decoder_sparse_step": 2}, (0, 2))],
)
def test_qwen_says_which_layers_have_no_experts(changes, dense):
    config = from_hf({**config_dict("qwen3-moe"), "num_hidden_layers": 4, **changes})
    assert config.experts is not None and config.experts.dense_layers == dense
    has_experts = [config.layer(layer).experts is not None for layer in range(4)]
    assert has_experts == [layer not in dense for layer in range(4)]


def test_layers_of_one_kind_have_one_config():
    config = from_hf(config_dict("gemma3"))
    local, whole, again = (config.layer(layer) for layer in range(3))
    assert local == again != whole
    assert (local.window, whole.window, config.windows) == (18, None, (18, None, 18))
    assert (local.rope_theta, whole.rope_theta) == (1e4, 1e6)
    plain = from_hf(config_dict())
    assert plain.layer(1) is plain and plain.windows == ()


@pytest.mark.parametrize("case", ["llama3", "gemma3", "glm4-moe", "gpt-oss", "deepseek-v2"])
def test_config_is_the_same_after_json(case):
    config = from_hf(config_dict(case))
    fields = json.loads(json.dumps(dataclasses.asdict(config)))
    assert config_from_fields(fields) == config


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: .* is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: only"),
        ({"sliding_window": None}, "has no 'sliding_window'"),
    ],
)
def test_what_gemma_may_not_have_is_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        from_hf({**config_dict("gemma3"), **changes})


def test_unknown_routing_of_deepseek_is_refused():
    with pytest.raises(UserError, match="topk_method='noaux_tc' is not supported; supported: gre"):
        from_hf({**config_dict("deepseek-v2"), "topk_method": "noaux_tc"})
