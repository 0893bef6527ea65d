import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jkvq import UserError
from jkvq.models.formats.hf_folder import HFFolder
from jkvq.models.joined import split_layer
from tests.models.helpers import config_dict, save_random_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A checkpoint in one file."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("whole")
    save_random_model("qwen2", folder)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """The same in several."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("sharded")
    save_random_model("qwen2", folder, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def copy_of(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "copy"))


def test_params_are_the_same_when_sharded(whole, sharded):
    ours, theirs = (HFFolder(folder).params(jnp.float32) for folder in (whole, sharded))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_params_are_the_file_s_tensors(whole):
    folder = HFFolder(whole)
    params = folder.params(jnp.float32)
    tensors = load_file(whole / "model.safetensors")
    split = {n: split_layer(folder.config, layer) for n, layer in params["layers"].items()}
    assert len(jax.tree.leaves({**params, "layers": split})) == len(tensors)
    np.testing.assert_array_equal(params["embedding"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(
        split[1]["attention"]["k"]["bias"],
        tensors["model.layers.1.self_attn.k_proj.bias"],
    )


def test_missing_shard_is_named(sharded, tmp_path):
    folder = copy_of(sharded, tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UserError, match=shard.name):
        HFFolder(folder)


@pytest.mark.parametrize("kept", [0, 100, -1])
def test_truncated_file_is_named(whole, tmp_path, kept):
    folder = copy_of(whole, tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"model\.safetensors is truncated"):
        HFFolder(folder).params(jnp.float32)


def test_truncated_shard_is_named(sharded, tmp_path):
    folder = copy_of(sharded, tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{shard.name} is truncated"):
        HFFolder(folder).params(jnp.float32)


def test_missing_config_is_named(whole, tmp_path):
    folder = copy_of(whole, tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"has no config\.json"):
        HFFolder(folder)


def test_damaged_config_is_named(whole, tmp_path):
    folder = copy_of(whole, tmp_path)
    (folder / "config.json").write_text('{"model_type": "qw')
    with pytest.raises(UserError, match=r"config\.json is not valid JSON"):
        HFFolder(folder)
    (folder / "config.json").write_text("[1, 2]")
    with pytest.raises(UserError, match=r"config\.json holds no JSON object"):
        HFFolder(folder)


def test_first_tensor_is_named_when_there_are_no_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_dict()))
    with pytest.raises(UserError, match="has no tensor"):
        HFFolder(tmp_path).params(jnp.float32)


def change_tensors(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    tensors = dict(load_file(file))
    change(tensors)
    save_file(tensors, file)


def test_missing_tensor_is_named(whole, tmp_path):
    folder, name = copy_of(whole, tmp_path), "model.layers.1.mlp.up_proj.weight"
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(UserError, match=f"no tensor '{name}'"):
        HFFolder(folder).params(jnp.float32)


def test_missing_tensor_is_named_when_the_index_promises_it(sharded, tmp_path):
    folder = copy_of(sharded, tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name, shard = "model.norm.weight", index["weight_map"]["model.norm.weight"]
    tensors = dict(load_file(folder / shard))
    tensors.pop(name)
    save_file(tensors, folder / shard)
    with pytest.raises(UserError, match=name):
        HFFolder(folder).params(jnp.float32)


def test_tensor_is_named_when_its_shape_is_wrong(whole, tmp_path):
    folder, name = copy_of(whole, tmp_path), "model.layers.0.self_attn.q_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:-1]}))
    with pytest.raises(UserError, match=rf"'{name}' has shape \(63, 64\).*\(64, 64\)"):
        HFFolder(folder).params(jnp.float32)


def write_large_checkpoint(folder: Path) -> int:
    """About 200 MB of bfloat16, no tensor more than a tenth; returns the file's size."""
    config = config_dict() | {
        "vocab_size": 20_000,
        "hidden_size": 512,
        "intermediate_size": 8192,
        "num_hidden_layers": 6,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (20_000, 512),
        "model.norm.weight": (512,),
        "lm_head.weight": (20_000, 512),
    }
    for layer in range(6):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (512, 512) for name in "qo"}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (256, 512) for name in "kv"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (8192, 512) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (512, 8192)
        shapes[f"{at}.input_layernorm.weight"] = (512,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (512,)
    rng = np.random.default_rng(0)
    save_file(
        {
            name: rng.integers(0, 0x3F80, shape, np.uint16).view(ml_dtypes.bfloat16)
            for name, shape in shapes.items()
        },
        folder / "model.safetensors",
    )
    return (folder / "model.safetensors").stat().st_size


# Linux keeps a process's peak in VmHWM. getrusage's ru_maxrss would begin at the peak of the
# process that started this one, which is larger than all that is measured here.
LOAD = """
import re, sys
from pathlib import Path
import jax, jax.numpy as jnp, jkvq
from jkvq.models.formats.hf_folder import HFFolder

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

jnp.zeros(1).block_until_ready()
checkpoint, before = HFFolder(Path(sys.argv[1])), peak()
params = jax.block_until_ready(checkpoint.params(jnp.bfloat16))
print(peak() - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_little_more_than_the_file(tmp_path):
    size = write_large_checkpoint(tmp_path)
    assert 150e6 < size < 250e6
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, check=True
    )
    growth, loaded = map(int, result.stdout.split())
    assert loaded == pytest.approx(size, rel=1e-3)
    assert growth > 0.9 * size  # the parameters themselves are in it
    assert growth < 1.5 * size
