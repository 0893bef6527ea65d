"""Quantized checkpoints, packed here as the programs that write them do."""

import json
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jkvq import UserError
from jkvq.models.formats.hf_folder import HFFolder
from jkvq.models.formats.quantized.scheme import dequantizing
from tests.models.helpers import config_dict, save_random_model

OUT, IN, GROUP = 24, 64, 16
RNG = np.random.default_rng(0)
Q = RNG.integers(0, 16, (IN, OUT))  # 4-bit numbers, inputs first
ZERO = RNG.integers(1, 16, (IN // GROUP, OUT))
SCALE = RNG.uniform(0.5, 2, (IN // GROUP, OUT)).astype(np.float16)
GROUP_OF = np.arange(IN) // GROUP
BLOCK = 128


def reading(method: dict, tensors: dict[str, np.ndarray]):
    return dequantizing({"quantization_config": method}, tensors.__getitem__)


def affine(group=GROUP_OF) -> np.ndarray:
    """(q - zero) scale, one number at a time."""
    weight = np.zeros((OUT, IN), np.float32)
    for i in range(IN):
        for o in range(OUT):
            number = int(Q[i, o]) - int(ZERO[group[i], o])
            weight[o, i] = number * np.float32(SCALE[group[i], o])
    return weight


def pack(numbers: np.ndarray, order: Sequence[int] = range(8)) -> np.ndarray:
    """Eight numbers of the last axis in a word: number order[i] is at bits 4 i."""
    words = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // 8), np.uint32)
    for column in range(words.shape[-1]):
        for i, place in enumerate(order):
            words[..., column] |= numbers[..., column * 8 + place].astype(np.uint32) << (4 * i)
    return words.view(np.int32)


def test_awq_is_dequantized():
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ's order_map
    tensors = {
        "x.qweight": pack(Q, order),
        "x.qzeros": pack(ZERO, order),
        "x.scales": SCALE,
        "y.weight": np.ones(3),
    }
    read = reading({"quant_method": "awq", "bits": 4, "version": "gemm"}, tensors)
    np.testing.assert_array_equal(read("x.weight"), affine())
    np.testing.assert_array_equal(read("y.weight"), np.ones(3))
    for name in ("z.weight", "x.bias"):
        with pytest.raises(KeyError, match=name):
            read(name)


@pytest.mark.parametrize("form", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("ordered", [False, True])
def test_gptq_is_dequantized(form, ordered):
    group = RNG.permutation(GROUP_OF) if ordered else GROUP_OF
    tensors = {
        "x.qweight": np.ascontiguousarray(pack(Q.T).T),
        "x.qzeros": pack(ZERO - (form != "gptq_v2")),  # AutoGPTQ stores zeros less one
        "x.scales": SCALE,
    }
    if ordered:
        tensors["x.g_idx"] = group.astype(np.int32)
    read = reading({"quant_method": "gptq", "bits": 4, "checkpoint_format": form}, tensors)
    np.testing.assert_array_equal(read("x.weight"), affine(group))


def compressed(form: str, bits: int, **more) -> dict:
    weights = {"num_bits": bits, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"weights": weights}},
    }


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("package", [False, True], ids=["by-hand", "compressed-tensors"])
def test_packed_compressed_tensors_are_dequantized(zeros, package):
    signed, zero = Q.T - 8, (ZERO.T - 8 if zeros else np.zeros_like(ZERO.T))
    scale = np.ascontiguousarray(SCALE.T)
    words, zero_words = pack(Q.T), np.ascontiguousarray(pack((zero + 8).T).T)
    if package:  # what the project's own packer makes of them
        torch = pytest.importorskip("torch")
        helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
        theirs = (
            helpers.pack_to_int32(torch.from_numpy(x.astype(np.int8)), 4, packed_dim=axis).numpy()
            for x, axis in ((signed, 1), (zero, 0))
        )
        words, zero_words = theirs
    tensors = {
        "x.weight_packed": words,
        "x.weight_scale": scale,
        "x.weight_shape": np.asarray([OUT, IN]),
    }
    if zeros:
        tensors["x.weight_zero_point"] = zero_words
    read = reading(compressed("pack-quantized", 4, group_size=GROUP), tensors)
    each = (np.repeat(x, GROUP, axis=1) for x in (zero, scale.astype(np.float32)))
    by, times = each
    np.testing.assert_array_equal(read("x.weight"), ((signed - by) * times).astype(np.float32))


@pytest.mark.parametrize("shape", [(), (1,), (OUT, 1)], ids=["tensor", "one", "rows"])
@pytest.mark.parametrize("form", ["float-quantized", "int-quantized"])
def test_8_bit_compressed_tensors_are_dequantized(form, shape):
    q = RNG.integers(-127, 128, (OUT, IN)).astype(np.int8)
    if form == "float-quantized":
        q = RNG.normal(size=(OUT, IN)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.asarray(RNG.uniform(0.5, 2, shape), np.float32)
    read = reading(compressed(form, 8), {"x.weight": q, "x.weight_scale": scale})
    np.testing.assert_array_equal(read("x.weight"), q.astype(np.float32) * scale)


def test_float8_blocks_are_dequantized_when_the_last_are_cut_short():
    weight = RNG.normal(size=(BLOCK + 60, 2 * BLOCK)).astype(ml_dtypes.float8_e4m3fn)
    scale = RNG.uniform(0.5, 2, (2, 2)).astype(np.float32)
    method = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    found = reading(method, {"x.weight": weight, "x.weight_scale_inv": scale})("x.weight")
    for row, column in ((0, 0), (BLOCK - 1, BLOCK), (BLOCK, BLOCK - 1), (BLOCK + 59, 255)):
        wanted = np.float32(weight[row, column]) * scale[row // BLOCK, column // BLOCK]
        assert found[row, column] == wanted
    with pytest.raises(UserError, match=r"no 'x\.weight_scale_inv'"):
        reading(method, {"x.weight": weight})("x.weight")


def test_mxfp4_blocks_of_experts_are_dequantized():
    blocks = RNG.integers(0, 256, (2, OUT, IN // 32, 16)).astype(np.uint8)
    scales = RNG.integers(120, 134, blocks.shape[:3]).astype(np.uint8)
    tensors = {"x_blocks": blocks, "x_scales": scales, "y": np.ones(3)}
    read = reading({"quant_method": "mxfp4"}, tensors)
    found, values = read("x"), [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert found.shape == (2, IN, OUT)
    for expert, i, o in np.ndindex(2, IN, OUT):
        byte = int(blocks[expert, o, i // 32, i % 32 // 2])
        code = byte >> 4 if i % 2 else byte & 15
        number = values[code & 7] * (-1 if code & 8 else 1)
        assert found[expert, i, o] == number * 2.0 ** (int(scales[expert, o, i // 32]) - 127)
    np.testing.assert_array_equal(read("y"), np.ones(3))
    with pytest.raises(KeyError, match="z"):
        read("z")


def test_float8_folder_equals_the_one_it_was_made_of(tmp_path):
    """Numbers that 8-bit floats hold, under scales of powers of two, come back as they were."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    save_random_model("llama", tmp_path)
    file, block = tmp_path / "model.safetensors", 48
    tensors, plain = dict(load_file(file)), {}
    for name, tensor in list(tensors.items()):
        if "proj" not in name:
            continue
        coded = tensor.to(torch.float8_e4m3fn)
        grid = [-(-size // block) for size in tensor.shape]
        scale = 2.0 ** torch.arange(grid[0] * grid[1]).reshape(grid)
        rows, columns = (torch.arange(size) // block for size in tensor.shape)
        plain[name] = coded.float() * scale[rows][:, columns]
        tensors |= {name: coded, f"{name}_scale_inv": scale}
    save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = HFFolder(tmp_path).params(jnp.float32)["layers"][1]
    wanted = plain["model.layers.1.mlp.down_proj.weight"].numpy()
    np.testing.assert_array_equal(layer["mlp"]["down"]["weight"], wanted)
    parts = [plain[f"model.layers.1.self_attn.{part}_proj.weight"].numpy() for part in "qkv"]
    np.testing.assert_array_equal(layer["attention"]["qkv"]["weight"], np.concatenate(parts))


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (
            {"quant_method": "hqq"},
            "quantization 'hqq' is not supported; supported: fp8, mxfp4, compr",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 of format 'e5m2' is not supported"),
        ({"quant_method": "awq", "bits": 3}, "awq with bits=3 is not supported; supported: 4"),
        (
            {"quant_method": "awq", "bits": 4, "version": "gemv"},
            "awq with version='gemv' is not supported; supported: gemm",
        ),
        ({"quant_method": "gptq", "bits": 2}, "gptq with bits=2 is not supported; .* 4 and 8"),
        (compressed("nvfp4-pack-quantized", 4), "of format nvfp4-pack-quantized is not supported"),
        (compressed("pack-quantized", 2), "weights of 2 bits is not supported"),
    ],
)
def test_unknown_scheme_is_refused_before_weights_are_read(method, sentence, tmp_path: Path):
    config = {**config_dict(), "quantization_config": method}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=sentence):
        HFFolder(tmp_path)
