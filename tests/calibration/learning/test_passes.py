import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jkvq
from jkvq.calibration.learning import straight_through
from jkvq.calibration.learning.learn import _updated, turned_layers
from jkvq.calibration.learning.parameters import Sides, Start, starting_from, unchanged
from jkvq.calibration.learning.passes import Layers, Network, Windows, first_that_reads_coded
from jkvq.evaluation.perplexity import compare
from jkvq.evaluation.subjects import Cached
from jkvq.models.decoder import Hidden, finish, logits
from tests.calibration.learning.example import CACHE, CALIBRATED_TOKENS, TEXT, model

T = 96


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> tuple[Network, dict[str, Start], jkvq.Artefact]:
    place = tmp_path_factory.mktemp("start") / "artefact"
    made = jkvq.calibrate(model(), text=TEXT, tokens=CALIBRATED_TOKENS, out=place)
    spec, own = jkvq.parse_spec(CACHE), model()
    network = Network(own.config, own.params, spec)
    return network, starting_from(made.calibration, spec, own.config.layers), made


@pytest.mark.parametrize("window_bits", [16, 8])
def test_the_kl_is_that_of_the_cache(start, window_bits):
    """That of the model over its pages, and near the end of the context."""
    network, sides, made = start
    spec = dataclasses.replace(network.spec, window_bits=window_bits)
    network = dataclasses.replace(network, spec=spec)
    own, tokens = model(), model().tokenizer.encode(TEXT.text)[:T]
    layers = turned_layers(sides, unchanged(sides))
    exact, coded = (
        Cached(jkvq.with_cache(own, "f32,page=16")),
        Cached(jkvq.with_cache(own, spec, made.calibration)),
    )
    read = T - first_that_reads_coded(network.spec, T)
    for first in (0, 912):
        stand = jnp.arange(first, first + T, dtype=jnp.int32)[None]
        scored = compare({"": exact, "coded": coded}, [*tokens, 0], reference="", position=first)
        kl = scored["coded"].kl
        assert kl is not None and kl > 1e-3
        found = network.kl(layers, Windows(jnp.asarray([tokens], jnp.int32), stand))
        np.testing.assert_allclose(found * read, kl * T, rtol=0.01)


def test_the_gradient_is_that_of_finite_differences(start, monkeypatch):
    """Of codes that miss their values by what does not depend on them: such have a derivative."""
    missed = 0.4 * jnp.sin(3.0 * jnp.arange(16.0))

    def moved(level, _):
        return level + jnp.expand_dims(missed, range(level.ndim - 1))

    monkeypatch.setattr(straight_through, "_nearest", moved)
    for rounding in ("as_bfloat16", "as_float16"):
        monkeypatch.setattr(straight_through, rounding, lambda x: x)
    network, sides, _ = start
    # A length of its own: programs of others have codes that are whole.
    tokens = jnp.asarray([model().tokenizer.encode(TEXT.text)[:80]] * 2, jnp.int32)
    stand = jnp.stack([jnp.arange(80, dtype=jnp.int32), jnp.arange(500, 580, dtype=jnp.int32)])
    windows, learned = Windows(tokens, stand), _random(unchanged(sides), 0.1)
    typical = 0.5 * float(network.kl(turned_layers(sides, learned), windows))

    def damped(learned: Sides) -> float:
        exact, found = (
            _distributions(network, windows, layers)
            for layers in (None, turned_layers(sides, learned))
        )
        kl = (np.exp(exact) * (exact - found)).sum(-1)
        return float((typical * np.log1p(kl / typical)).mean())

    _, by_layers = network.kl_and_gradient(turned_layers(sides, learned), windows, typical)
    descent = optax.sgd(1.0)
    lower, _ = _updated(descent, sides, learned, descent.init(learned), by_layers)
    gradient = jax.tree.map(jnp.subtract, learned, lower)
    for side in ("key", "value"):
        for part in learned[side]._fields:
            way = getattr(gradient[side], part)
            way = way / jnp.linalg.norm(way.ravel())
            ahead, behind = (
                {
                    **learned,
                    side: learned[side]._replace(**{part: getattr(learned[side], part) + by * way}),
                }
                for by in (0.02, -0.02)
            )
            expected = (damped(ahead) - damped(behind)) / 0.04
            found = (getattr(gradient[side], part) * way).sum()
            np.testing.assert_allclose(found, expected, rtol=0.03, err_msg=f"{side} {part}")


def _distributions(network: Network, windows: Windows, layers: Layers | None) -> np.ndarray:
    """Logarithms, of the tokens that read coded ones, in float64."""
    *_, x = network.states(windows, layers)
    x = finish(network.config, network.params["norm"], Hidden.of(x))
    first = first_that_reads_coded(network.spec, x.shape[1])
    found = np.asarray(logits(network.config, network.params, x[:, first:]), np.float64)
    return found - np.log(np.exp(found).sum(-1, keepdims=True))


def _random(like: Sides, size: float) -> Sides:
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(jax.random.key(5), len(leaves))
    return structure.unflatten(
        [size * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
    )
