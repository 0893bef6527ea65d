"""Wrong shapes are found: without that, wrong signatures would stay."""

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from jkvq.pallas_kernels.reference.merge import merge
from jkvq.pallas_kernels.rotary import angles


def test_an_array_has_as_many_axes_as_its_signature():
    angles(jnp.ones(2), jnp.ones(3))
    with pytest.raises(TypeCheckError):
        angles(jnp.ones((2, 2)), jnp.ones(3))


def test_sizes_of_one_name_agree():
    out, lse = jnp.ones((3, 4)), jnp.ones(3)
    merge(out, lse, out, lse)
    with pytest.raises(TypeCheckError):
        merge(out, lse, out[:, :1], lse)
