import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq import UserError
from jkvq.models.families.architecture import from_hf
from jkvq.models.formats.weights import load_params, source_name
from jkvq.models.joined import abstract_checkpoint
from tests.models.helpers import config_dict

CONFIG = from_hf(config_dict("qwen2"))
# Names that say which parameter they are; a bias or weight follows.
NAMES = {
    "embedding": "the-embedding",
    "norm": "norm",
    "head": "head",
    **{
        part: f"layer-{{layer}}/{part}"
        for part in [
            *["attention_norm", "attention.q", "attention.k", "attention.v", "attention.o"],
            *["mlp_norm", "mlp.gate", "mlp.up", "mlp.down"],
        ]
    },
}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("embedding",), "the-embedding"),
        (("head", "weight"), "head.weight"),
        (("layers", 1, "attention", "q", "bias"), "layer-1/attention.q.bias"),
        (("layers", 0, "mlp_norm", "weight"), "layer-0/mlp_norm.weight"),
    ],
)
def test_source_name_of_each_kind_of_path(path, name):
    assert source_name(path, NAMES) == name


def tensors() -> dict[str, np.ndarray]:
    """A random tensor under each name that the config asks for."""
    rng = np.random.default_rng(0)
    leaves = jax.tree_util.tree_leaves_with_path(abstract_checkpoint(CONFIG, jnp.float32))
    return {
        source_name(tuple(key.key for key in path), NAMES): rng.standard_normal(
            leaf.shape, np.float32
        )
        for path, leaf in leaves
    }


def test_each_tensor_is_read_once():
    stored, read = tensors(), []

    def reader(name: str) -> np.ndarray:
        read.append(name)
        return stored[name]

    params = load_params(CONFIG, jnp.float32, NAMES, reader)
    assert sorted(read) == sorted(stored)
    assert len(stored) == 3 + 2 * 12  # two layers of two norms, seven matrices and three biases
    layer = params["layers"][1]
    np.testing.assert_array_equal(layer["mlp"]["down"]["weight"], stored["layer-1/mlp.down.weight"])
    for kind in ("weight", "bias"):
        parts = [stored[f"layer-1/attention.{part}.{kind}"] for part in ("q", "k", "v")]
        np.testing.assert_array_equal(layer["attention"]["qkv"][kind], np.concatenate(parts))
    parts = [stored[f"layer-1/mlp.{part}.weight"] for part in ("gate", "up")]
    np.testing.assert_array_equal(layer["mlp"]["gate_up"]["weight"], np.concatenate(parts))


def test_tensor_is_named_when_float16_does_not_hold_it():
    stored = tensors()
    stored["layer-1/attention.k.bias"][3] = 1e5
    assert load_params(CONFIG, jnp.bfloat16, NAMES, stored.__getitem__) is not None
    with pytest.raises(UserError, match=r"'layers\.1\.attention\.qkv\.bias' holds numbers beyond"):
        load_params(CONFIG, jnp.float16, NAMES, stored.__getitem__)


def test_missing_tensor_is_named():
    stored = tensors()
    del stored["layer-1/attention.v.bias"]
    with pytest.raises(UserError, match=r"no tensor 'layer-1/attention\.v\.bias'"):
        load_params(CONFIG, jnp.float32, NAMES, stored.__getitem__)


def test_tensor_is_named_when_its_shape_is_wrong():
    stored = tensors()
    stored["norm.weight"] = np.zeros((64, 1), np.float32)
    with pytest.raises(UserError, match=r"'norm\.weight' has shape \(64, 1\).*\(64,\)"):
        load_params(CONFIG, jnp.float32, NAMES, stored.__getitem__)
