import dataclasses
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from jkvq import UserError
from jkvq.models.formats.gguf_file import GGUFFile
from jkvq.models.formats.hf_folder import HFFolder
from jkvq.models.joined import split_layer
from tests.models.helpers import (
    CASES,
    LLAMA3_ROPE,
    finish,
    interleave,
    save_random_model,
    write_gguf,
)

# llama.cpp has no architecture of its own for mistral.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


@pytest.mark.parametrize("case", [case for case in CASES if case != "llama3"])
def test_params_and_config_equal_the_hf_folder_s(case, tmp_path):
    pytest.importorskip("torch")
    model = save_random_model(case, tmp_path)
    family = CASES[case][0]
    write_gguf(tmp_path / "model.gguf", model, architecture=ARCHITECTURES[family])
    theirs, ours = HFFolder(tmp_path), GGUFFile(tmp_path / "model.gguf")
    assert_same_params(ours.params(jnp.float32), theirs.params(jnp.float32))
    assert_same_config(ours, theirs)


def test_rope_factors_equal_the_hf_folder_s_llama3_scaling(tmp_path):
    pytest.importorskip("torch")
    model = save_random_model("llama3", tmp_path)
    plain = LLAMA3_ROPE["rope_theta"] ** -(np.arange(8) * 2 / 16)
    factors = plain / model.model.rotary_emb.inv_freq.numpy()
    assert factors.min() == pytest.approx(1) and factors.max() == pytest.approx(8)
    write_gguf(tmp_path / "model.gguf", model, architecture="llama", rope_factors=factors)
    theirs, ours = HFFolder(tmp_path), GGUFFile(tmp_path / "model.gguf")
    assert_same_params(ours.params(jnp.float32), theirs.params(jnp.float32))
    assert_same_config(ours, theirs)


# Cases of later families -> llama.cpp's name
LATER = {
    "olmo2": "olmo2",
    "phi4-mini": "phi3",
    "glm4": "glm4",
    "mixtral": "llama",
    "qwen2-moe": "qwen2moe",
    "qwen3-moe": "qwen3moe",
    "glm4-moe": "glm4moe",
    "gemma3": "gemma3",
    "gpt-oss": "gpt-oss",
}


@pytest.mark.parametrize("case", LATER)
def test_params_and_config_of_later_families_equal_the_hf_folder_s(case, tmp_path):
    pytest.importorskip("torch")
    model = save_random_model(case, tmp_path)
    write_gguf(tmp_path / "model.gguf", model, architecture=LATER[case])
    theirs, ours = HFFolder(tmp_path), GGUFFile(tmp_path / "model.gguf")
    assert_same_params(ours.params(jnp.float32), theirs.params(jnp.float32), rtol=1e-6)
    fields, wanted = (dataclasses.asdict(x.config) for x in (ours, theirs))
    for name in ("rope_divisors", "rope_gain", "norm_eps", "rope_theta"):  # of float32
        assert fields.pop(name) == pytest.approx(wanted.pop(name), rel=1e-6)
    if case == "gemma3":  # files do not say
        assert fields.pop("score_scale") == 32**-0.5 and wanted.pop("score_scale") == 24**-0.5
    if case == "gpt-oss":  # nor do they here: all have the same
        unsaid = {"clamp": 0.7, "sharpness": 1.3}, {"clamp": 7.0, "sharpness": 1.702}
        assert {name: wanted["experts"][name] for name in unsaid[0]} == unsaid[0]
        wanted["experts"] |= unsaid[1]
    assert fields == wanted


def assert_same_params(ours, theirs, rtol: float = 0):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, atol=rtol), ours, theirs)


def assert_same_config(ours: GGUFFile, theirs: HFFolder):
    """All fields but the family, which is a name; GGUF keeps numbers in float32."""
    fields, wanted = dataclasses.asdict(ours.config), dataclasses.asdict(theirs.config)
    del fields["family"], wanted["family"]
    for name in ("norm_eps", "rope_theta", "rope_divisors"):
        assert fields.pop(name) == pytest.approx(wanted.pop(name), rel=1e-6)
    assert fields == wanted


WIDTH, MLP, HEADS, KV_HEADS, VOCAB = 256, 512, 4, 2, 50
MATRICES = {
    "token_embd": (VOCAB, WIDTH),
    "output": (VOCAB, WIDTH),
    "blk.0.attn_q": (WIDTH, WIDTH),
    "blk.0.attn_k": (WIDTH // 2, WIDTH),
    "blk.0.attn_v": (WIDTH // 2, WIDTH),
    "blk.0.attn_output": (WIDTH, WIDTH),
    "blk.0.ffn_gate": (MLP, WIDTH),
    "blk.0.ffn_up": (MLP, WIDTH),
    "blk.0.ffn_down": (WIDTH, MLP),
}


def write_quantized(path: Path, matrices: dict[str, np.ndarray], kind: Kind) -> GGUFFile:
    """A llama of one layer whose matrices are given coded as ``kind``."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, coded in matrices.items():
        writer.add_tensor(f"{name}.weight", coded, raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    finish(writer)
    return GGUFFile(path)


def matrices_of(file: GGUFFile) -> dict[str, np.ndarray]:
    """Our parameters under GGUF's names and in GGUF's order of rows."""
    params = file.params(jnp.float32)
    layer = split_layer(file.config, params["layers"][0])
    attention, mlp = layer["attention"], layer["mlp"]
    ours = {
        "token_embd": params["embedding"],
        "output": params["head"]["weight"],
        "blk.0.attn_q": interleave(np.asarray(attention["q"]["weight"]), HEADS),
        "blk.0.attn_k": interleave(np.asarray(attention["k"]["weight"]), KV_HEADS),
        "blk.0.attn_v": attention["v"]["weight"],
        "blk.0.attn_output": attention["o"]["weight"],
        "blk.0.ffn_gate": mlp["gate"]["weight"],
        "blk.0.ffn_up": mlp["up"]["weight"],
        "blk.0.ffn_down": mlp["down"]["weight"],
    }
    return {name: np.asarray(array) for name, array in ours.items()}


# The largest error of each kind on weights of up to 1, half a step or rounding of a float.
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (Kind.F32, 0.0),
        (Kind.F16, 2**-11),
        (Kind.BF16, 2**-8),
        (Kind.Q8_0, 0.6 / 127),
        (Kind.Q5_1, 0.6 * 2 / 31),
        (Kind.Q4_1, 0.6 * 2 / 15),
        (Kind.Q4_0, 1.1 / 8),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else "",
)
def test_params_are_what_the_gguf_package_dequantizes(kind, error, tmp_path):
    rng = np.random.default_rng(0)
    plain = {name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in MATRICES.items()}
    coded = {name: quantize(matrix, kind) for name, matrix in plain.items()}
    file = write_quantized(tmp_path / "model.gguf", coded, kind)
    ours = matrices_of(file)
    for name, matrix in plain.items():
        np.testing.assert_array_equal(ours[name], dequantize(coded[name], kind))
        np.testing.assert_allclose(ours[name], matrix, rtol=0, atol=error)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_params_are_what_the_gguf_package_dequantizes_when_k_quantized(kind, tmp_path):
    rng = np.random.default_rng(0)  # the package cannot quantize these: any bytes will do
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    coded = {
        name: rng.integers(0, 0x3F, (rows, columns // block * block_bytes), np.uint8)
        for name, (rows, columns) in MATRICES.items()
    }
    file = write_quantized(tmp_path / "model.gguf", coded, kind)
    ours = matrices_of(file)
    for name, matrix in coded.items():
        assert np.isfinite(ours[name]).all() and ours[name].std() > 0
        np.testing.assert_array_equal(ours[name], dequantize(matrix, kind))


def test_params_are_cast_when_bfloat16_is_asked_for(tmp_path):
    rng = np.random.default_rng(0)
    plain = {name: rng.standard_normal(shape, np.float32) for name, shape in MATRICES.items()}
    file = write_quantized(tmp_path / "model.gguf", plain, Kind.F32)
    params = file.params(jnp.bfloat16)
    assert params["embedding"].dtype == jnp.bfloat16
    np.testing.assert_allclose(
        params["embedding"].astype(jnp.float32), plain["token_embd"], rtol=2**-8
    )


def test_missing_tensor_is_named(tmp_path):
    matrices = {
        name: np.zeros(shape, np.float32)
        for name, shape in MATRICES.items()
        if name != "blk.0.ffn_up"
    }
    file = write_quantized(tmp_path / "model.gguf", matrices, Kind.F32)
    with pytest.raises(UserError, match=r"no tensor 'blk\.0\.ffn_up\.weight'"):
        file.params(jnp.float32)


def test_tensor_is_named_when_its_shape_is_wrong(tmp_path):
    matrices = {name: np.zeros(shape, np.float32) for name, shape in MATRICES.items()}
    matrices["blk.0.attn_v"] = np.zeros((64, WIDTH), np.float32)
    file = write_quantized(tmp_path / "model.gguf", matrices, Kind.F32)
    with pytest.raises(UserError, match=r"'blk\.0\.attn_v\.weight' has shape \(64, 256\)"):
        file.params(jnp.float32)
