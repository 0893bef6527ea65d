"""The door to cuDNN is jax's own business: here it is seen on a CPU when jax moves it."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.pallas_kernels.cudnn import fused_attention
from tests.reference import attention

MODULE, FUNCTION = "jax._src.cudnn.fused_attention_stablehlo", "dot_product_attention"
B, T, S, SCALE = 2, 5, 7, 0.3


def gone(what: str) -> str:
    return f"jax {jax.__version__} has no {what} any more: mend pallas_kernels/cudnn.py"


@pytest.fixture
def cudnn(monkeypatch) -> Any:
    """jax's module, whose attention checks its arguments as the real one and runs without cuDNN."""
    try:
        module: Any = importlib.import_module(MODULE)
    except ImportError:
        pytest.fail(gone(f"module {MODULE}"))
    for name in (FUNCTION, "MaskType"):
        if not hasattr(module, name):
            pytest.fail(gone(f"{MODULE}.{name}"))
    signature = inspect.signature(getattr(module, FUNCTION))

    def attend(*args, **kwargs):
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            pytest.fail(gone(f"{FUNCTION} that takes what we pass ({error})"))
        kind = given["mask_type"]
        out, lse = jax.nn.dot_product_attention(
            *(given[name].astype(jnp.float32) for name in ("query", "key", "value")),
            scale=given["scale"],
            is_causal=kind is module.MaskType.CAUSAL,
            query_seq_lengths=given.get("q_seqlen"),
            key_value_seq_lengths=given.get("kv_seqlen"),
            implementation="xla",
            return_residual=True,
        )
        assert given["return_residual"]
        assert (kind is module.MaskType.PADDING) == ("kv_seqlen" in given)
        return out.astype(given["query"].dtype), lse.swapaxes(1, 2)  # [B, N, T], as cuDNN has it

    monkeypatch.setattr(module, FUNCTION, attend)
    return module


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, np.ones((B, T, S), bool)),
        ({"causal": True}, np.broadcast_to(np.tri(T, dtype=bool), (B, T, T))),
        ({"lengths": [3, 7]}, np.broadcast_to(np.arange(S) < [[[3]], [[7]]], (B, T, S))),
    ],
    ids=["all", "causal", "lengths"],
)
def test_jax_takes_what_we_pass_to_cudnn(cudnn, options, seen):
    tokens = seen.shape[2]
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(B, T, 4, 16)), jnp.float16)
    k, v = (jnp.asarray(rng.normal(size=(B, tokens, 2, 16)), jnp.float16) for _ in range(2))
    given: dict[str, Any] = {
        name: value if value is True else jnp.asarray(value) for name, value in options.items()
    }
    out, lse = fused_attention(q, k, v, scale=SCALE, **given)
    assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)
    qs, ks, vs = (np.asarray(x, np.float64) for x in (q, k, v))
    for b in range(B):
        wanted_out, wanted_lse = attention(qs[b], ks[b], vs[b], seen[b], SCALE)
        np.testing.assert_allclose(out[b], wanted_out, atol=2e-3)  # rounded to 16 bits
        np.testing.assert_allclose(lse[b], wanted_lse, atol=1e-5)


def test_nothing_but_the_door_to_cudnn_names_what_jax_keeps_private():
    root = Path(__file__).parents[2]
    folders = ("jkvq", "models", "calibration", "pallas_kernels", "scripts")
    sources = [path for folder in folders for path in (root / folder).rglob("*.py")]
    found = {str(path.resolve().relative_to(root)) for path in sources if names_private(path)}
    assert found == {"pallas_kernels/cudnn.py"}


def names_private(path: Path) -> bool:
    return "jax._src" in path.read_text()
