"""Projections that are joined: which rows are whose."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.models.decoder import abstract_params
from jkvq.models.joined import abstract_checkpoint, split_layer
from tests.tiny import CONFIG, joined_layer


@pytest.mark.parametrize("biases", [(), ("qk_bias",), ("v_bias",), ("qk_bias", "v_bias")])
def test_a_layer_is_split_into_what_it_was_joined_of(biases):
    config = dataclasses.replace(CONFIG, **dict.fromkeys(biases, True))
    leaves, tree = jax.tree.flatten(abstract_checkpoint(config, jnp.float32)["layers"][0])
    rng = np.random.default_rng(0)
    layer = tree.unflatten(jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in leaves)
    joined = joined_layer(layer)
    wanted = abstract_params(config, jnp.float32)["layers"][0]
    assert jax.tree.map(jnp.shape, joined) == jax.tree.map(jnp.shape, wanted)
    jax.tree.map(np.testing.assert_array_equal, split_layer(config, joined), layer)
