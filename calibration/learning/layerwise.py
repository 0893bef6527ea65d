"""Learning layer by layer: every layer by itself, to lose little of what the next tokens need.

The attention of one layer over its cache is compared with the exact one, on the queries, keys and
values of the exact model. What its errors cost is known from one way back through the model
(fisher.py), so that no step runs the model.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jkvq.cache.specs.spec import CacheSpec
from jkvq.calibration.learning.fisher import Fisher, Read, fishers, observed
from jkvq.calibration.learning.optimizer import adam
from jkvq.calibration.learning.parameters import Learned, Sides, Start, turned
from jkvq.calibration.learning.passes import (
    ALIKE,
    Coded,
    Network,
    attend_at,
    first_that_reads_coded,
)
from jkvq.calibration.learning.text import Text
from jkvq.models.config import ModelConfig
from jkvq.support.progress import Bar, count_bar

WINDOWS = 32  # of the text
FISHER_WINDOWS = 8  # of these, by which it is known what errors cost
QUERIES = 256  # of one of them, in a step
_RATE = 0.006  # the greatest, of Adam


def learned_by_layers(
    network: Network, start: dict[str, Start], text: Text, learned: Sides, done: int, steps: int
) -> Iterator[Sides]:
    """What is learned after each layer, from the first that is not ``done`` on."""
    config, layers = network.config, network.config.layers
    windows = text.spread(WINDOWS)
    some = windows[:: -(-len(windows) // FISHER_WINDOWS)]
    with count_bar("Reading what each layer's errors cost", len(some) * layers) as bar:
        fisher = fishers(network, some, text.seed, bar)
    states, rotary = zip(*(network.embed(each.tokens) for each in windows), strict=True)
    states, rule = list(states), adam(_RATE, steps)
    with count_bar("Learning layer by layer", layers * steps) as bar:
        for layer in range(layers):
            own = config.layer(layer), network.params["layers"][layer]
            found = []
            for number, x in enumerate(states):
                states[number], read = observed(*own, x, rotary[number])
                found.append(read)
            if layer >= done:
                if layer not in network.spec.exact_layers:
                    task = _Layer(network, layer, start, found, fisher[layer], text)
                    learned = task.learned(learned, rule, steps, bar)
                yield learned
            bar.reach((layer + 1) * steps)


class _Layer:
    """A layer that learns by itself."""

    def __init__(
        self,
        network: Network,
        layer: int,
        start: dict[str, Start],
        read: list[Read],
        fisher: Fisher,
        text: Text,
    ):
        self.layer, self.text, self.fisher, self.read = layer, text, fisher, read
        self.how = network.config.layer(layer), network.spec.of_layer(layer)
        self.start = _of_layer(start, layer)
        T = read[0].q.shape[1]
        self.reading = np.arange(first_that_reads_coded(network.spec, T), T)

    def learned(
        self, learned: Sides, rule: optax.GradientTransformation, steps: int, bar: Bar
    ) -> Sides:
        """All that is learned, with this layer's after so many steps."""
        own = _of_layer(learned, self.layer)
        optimizer = rule.init(own)
        rng = np.random.default_rng([self.text.seed, self.layer])
        queries = min(QUERIES, len(self.reading))
        for step in range(steps):
            chosen = np.sort(rng.choice(self.reading, queries, replace=False)).astype(np.int32)
            stand = self.text.stand(np.asarray([step]))
            given = self.start, self.read[step % len(self.read)], self.fisher, stand, chosen
            own, optimizer = _step(rule, *self.how, own, optimizer, *given)
            bar.advance(1)
        return jax.tree.map(
            lambda every, x: jnp.asarray(every).at[self.layer].set(x[0]), learned, own
        )


def _of_layer(sides, layer: int):
    """That of one layer, which keeps its axis."""
    return jax.tree.map(lambda x: x[layer : layer + 1], sides)


def loss(
    config: ModelConfig,
    spec: CacheSpec,
    learned: dict[str, Learned],
    start: dict[str, Start],
    read: Read,
    fisher: Fisher,
    stand: Int[Array, "1 T"],
    position: Int[Array, " t"],
) -> Float[Array, ""]:
    """What the queries at these positions lose of the next tokens, as KL."""
    sides = {
        name: jax.tree.map(lambda x: x[0], turned(start[name], learned[name])) for name in start
    }
    coded = Coded(sides, stand, config, spec).coded(read.k, read.v)
    tokens = (x[0] for x in (read.k, read.v, *coded))
    how = spec, config.attention_scale, config.window, position
    out = attend_at(*how, read.q[0, position], *tokens, sinks=read.sinks)
    error = (out - read.out[0, position].astype(jnp.float32)).reshape(len(position), -1)
    return 0.5 * (jnp.matmul(error, fisher, precision="highest") * error).sum() / len(position)


@functools.partial(jax.jit, static_argnames=("rule", "config", "spec"), compiler_options=ALIKE)
def _step(
    rule: optax.GradientTransformation, config, spec, learned: Sides, optimizer, *given
) -> tuple[Sides, optax.OptState]:
    gradient = jax.grad(functools.partial(loss, config, spec))(learned, *given)
    with jax.numpy_dtype_promotion("standard"):  # as Optax has it
        updates, optimizer = rule.update(gradient, optimizer, learned)
    return optax.apply_updates(learned, updates), optimizer
