import jax
import jax.numpy as jnp

from jkvq.models.fingerprint import fingerprint
from tests.tiny import CONFIG, tiny_llm


def _name(params):
    return fingerprint(CONFIG, params)


def test_fingerprint_is_of_the_weights_not_of_their_dtype(tiny):
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.params)
    assert _name(narrow) == _name(tiny.params) == _name(tiny_llm().params)
    assert _name(tiny_llm(seed=1).params) != _name(tiny.params)


def test_fingerprint_sees_every_parameter(tiny):
    leaves, structure = jax.tree.flatten(tiny.params)
    found = {_name(tiny.params)}
    for index in range(len(leaves)):
        changed = list(leaves)
        changed[index] = changed[index] * 1.5
        found.add(_name(structure.unflatten(changed)))
    assert len(found) == len(leaves) + 1
