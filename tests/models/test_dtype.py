import jax
import jax.numpy as jnp
import pytest

from jkvq import UserError
from jkvq.models.dtype import compute_dtype, half_dtype, require_range


@pytest.mark.parametrize(
    ("backend", "capability", "dtype"),
    [
        ("cpu", 0.0, jnp.float32),
        ("gpu", 7.5, jnp.float16),
        ("gpu", 8.0, jnp.bfloat16),
        ("gpu", 0.0, jnp.bfloat16),  # not NVIDIA's
        ("tpu", 0.0, jnp.bfloat16),
    ],
)
def test_a_device_computes_in_what_it_is_fast_in(monkeypatch, capsys, backend, capability, dtype):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr("jkvq.models.dtype.compute_capability", lambda: capability)
    assert compute_dtype(None) is dtype
    said = capsys.readouterr().err
    assert ("has no bfloat16: computing in float16" in said) == (dtype is jnp.float16)
    assert compute_dtype("float32") is jnp.float32
    assert (half_dtype() == "float16") == (capability == 7.5)
    assert capsys.readouterr().err == ""


def test_a_dtype_that_is_not_known_is_refused():
    with pytest.raises(UserError, match="dtype 'float61' is not known: did you mean float16"):
        compute_dtype("float61")


def test_numbers_that_float16_does_not_hold_are_refused():
    wide = {"layers": {0: {"bias": jnp.asarray([1.0, 7e4])}}, "norm": {"weight": jnp.ones(2)}}
    narrow = jax.tree.map(lambda x: x.astype(jnp.float16), wide)
    sentence = r"^'layers\.0\.bias' holds numbers beyond 65,504, .* use dtype='float32'$"
    with pytest.raises(UserError, match=sentence):
        require_range(narrow, jnp.float16)
    assert require_range(wide, jnp.float32) is wide
