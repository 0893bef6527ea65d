"""Next-token KL of a model over a cache from the one over exact keys and values; its gradient.

A layer is what is compiled, and its input is all that is kept of it: the way back computes it once
more. Memory grows by one hidden state a layer, and not with what is inside.
"""

import collections
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkvq.cache.basis import Matrices, SideBasis
from jkvq.cache.specs.spec import CacheSpec, SideSpec
from jkvq.calibration.learning.attend import attend, attend_fused, serves_fused
from jkvq.calibration.learning.parameters import Turned
from jkvq.calibration.learning.straight_through import as_window, read_back
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Hidden, Params, embed, finish, logits, run_layer, without_layers
from jkvq.pallas_kernels.rotary import angles, rotate

_ROWS = 1024  # hidden states whose distributions are computed at once
# Two runs on one device give the same numbers.
ALIKE = {"xla_gpu_deterministic_ops": True}

Layers = list[dict[str, Turned]]


class Windows(NamedTuple):
    """Sequences of a text, and the positions that their keys are coded at."""

    tokens: Int[Array, "B T"]
    stand: Int[Array, "B T"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coded:
    """Attention of a layer whose queries read tokens as its cache has them.

    A query reads 16-bit windows as if they rounded nothing, which is little beside codes; windows
    of codes it reads as they are. Keys are coded as if they stood elsewhere in the context, with
    all that they see (observe.py).

    spec: of the layer; None reads everything as it is.
    """

    turned: dict[str, Turned]
    stand: Int[Array, "B T"]
    config: ModelConfig = field(metadata={"static": True})
    spec: CacheSpec | None = field(metadata={"static": True})

    def __call__(self, q, k, v, state, sinks=None):
        q, k, v = (heads.finished for heads in (q, k, v))
        how = self.spec, self.config.attention_scale, self.config.window
        coded = ()
        if self.spec is not None:
            (k, v), coded = self._read(k, v)
        if serves_fused(q, sinks):
            return attend_fused(*how, q, k, v, *coded), state
        one = functools.partial(attend, *how, sinks=sinks)
        return jax.lax.map(lambda x: one(*x), (q, k, v, *coded)), state

    def _read(self, k, v):
        """Keys and values as windows hold them, and as they are coded."""
        assert self.spec is not None
        frequency = jnp.asarray(self.config.rope_frequency, jnp.float32)
        position = jnp.arange(k.shape[1], dtype=jnp.int32)[None]
        cos, sin = angles(frequency, self.stand - position)
        middle = self.spec.middle(self.stand)
        of_key, of_value = self.spec.window_sides
        moved = rotate(k.astype(jnp.float32), cos, sin)
        keys = self._through("key", of_key, moved, frequency, middle)
        held, key = (None if x is None else rotate(x, cos, -sin) for x in keys)
        held_value, value = self._through("value", of_value, v, None, middle)
        held = k if held is None else held, v if held_value is None else held_value
        return held, (key, value)

    def _through(self, name: str, window: SideSpec, x, frequency, middle):
        """Tokens taken to the basis of the cache, held by a window and coded, and taken back.

        None is what a window of floats holds: the tokens themselves.
        """
        assert self.spec is not None
        spec: SideSpec = getattr(self.spec, name)
        if spec.codec == "float":
            return None, x.astype(jnp.float32)
        own = self.turned[name]
        mean = own.mean[None] if spec.center else None
        matrices = Matrices(own.rotation[None], own.dual[None])
        side = SideBasis(mean, frequency, matrices, None, None, None, None, spec)
        at = side.angles(middle)
        entered = side.enter(x.astype(jnp.float32), 0, at)
        if self.spec.windowed:
            entered = as_window(window, entered)

        def left(x):
            x = side.leave(x, 0)
            return x if mean is None else x + side.mean_at(0, at)

        held = None if window.codec == "float" else left(entered)
        return held, left(read_back(spec, entered))


@dataclass(frozen=True)
class Network:
    """A model, and the cache that it is to be run over."""

    config: ModelConfig
    params: Params
    spec: CacheSpec

    def kl(self, layers: Layers, windows: Windows) -> Float[Array, ""]:
        """Mean KL of the tokens that read coded ones."""
        exact = _last(self.states(windows, None))
        return _mean_kl(*self._compared(exact, _last(self.states(windows, layers))))

    def kl_of_one(
        self, layer: int, layers: Layers, windows: Windows, exact: list[Float[Array, "B T D"]]
    ) -> Float[Array, ""]:
        """The same with a single layer over its cache; ``exact`` are the ``states`` of none."""
        x, (_, rotary) = exact[layer], self._embed(windows.tokens)
        for each in range(layer, self.config.layers):
            own, weights, attend = self._layer(each, layers if each == layer else None, windows)
            x = _run(own, weights, x, rotary, attend)
        return _mean_kl(*self._compared(exact[-1], x))

    def kl_and_gradient(
        self, layers: Layers, windows: Windows, typical: float
    ) -> tuple[Float[Array, ""], Layers]:
        """The same, and the gradient of the damped KL by the matrices and means of every layer.

        Damped, a token's KL k counts as t log(1 + k / t) with t the ``typical`` one: what few
        tokens lose would be most of the gradient, and says little of what others lose.
        """
        kept = list(self.states(windows, layers))
        exact = _last(self.states(windows, None))
        (_, kl), back = _damped_and_gradient(*self._compared(exact, kept.pop()), typical)
        _, rotary = self._embed(windows.tokens)
        gradient: Layers = []
        for layer in reversed(range(self.config.layers)):
            own = self._layer(layer, layers, windows)
            of_layer, back = _pull(*own[:2], kept.pop(), rotary, own[2], back)
            gradient.append(of_layer)
        return kl, gradient[::-1]

    def states(self, windows: Windows, layers: Layers | None) -> Iterator[Float[Array, "B T D"]]:
        """Hidden states before every layer and behind the last; everything exact without layers."""
        x, rotary = self._embed(windows.tokens)
        yield x
        for layer in range(self.config.layers):
            own, weights, attend = self._layer(layer, layers, windows)
            x = _run(own, weights, x, rotary, attend)
            yield x

    def _layer(self, layer: int, layers: Layers | None, windows: Windows):
        own, spec = self.config.layer(layer), None
        if layers is not None and layer not in self.spec.exact_layers:
            spec = self.spec.of_layer(layer)
        turned = {} if layers is None else layers[layer]
        return own, self.params["layers"][layer], Coded(turned, windows.stand, own, spec)

    def _embed(self, tokens: Int[Array, "B T"]):
        B, T = tokens.shape
        position = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
        hidden, rotary = embed(self.config, self.params["embedding"], tokens, position)
        return hidden.total, rotary

    def _compared(self, exact: Float[Array, "B T D"], x: Float[Array, "B T D"]):
        """What the KL of final states over the cache from exact ones is computed from."""
        first = first_that_reads_coded(self.spec, x.shape[1])
        return self.config, without_layers(self.params), first, exact, x


def _last(states: Iterator[Array]) -> Array:
    return collections.deque(states, maxlen=1).pop()


def first_that_reads_coded(spec: CacheSpec, tokens: int) -> int:
    """The first token of a sequence that reads coded ones; ``tokens`` if none of them does."""
    return int((spec.packed(np.arange(1, tokens + 1)) == 0).sum())


@functools.partial(jax.jit, static_argnames="config", compiler_options=ALIKE)
def _run(config: ModelConfig, weights: Params, x, rotary, attend: Coded) -> Float[Array, "B T D"]:
    return run_layer(config, weights, Hidden.of(x), rotary, attend, None)[0].total


@functools.partial(jax.jit, static_argnames="config", compiler_options=ALIKE)
def _pull(config: ModelConfig, weights: Params, x, rotary, attend: Coded, back):
    """The gradient of a layer's matrices and means, and of its input, from that of its output."""

    def run(turned: dict[str, Turned], x):
        own = Coded(turned, attend.stand, attend.config, attend.spec)
        return run_layer(config, weights, Hidden.of(x), rotary, own, None)[0].total

    return jax.vjp(run, attend.turned, x)[1](back)


def _kl_of_tokens(
    config: ModelConfig, ends: Params, first: int, exact: Float[Array, "B T D"], x
) -> Float[Array, " rows"]:
    """The KL of each token from the first on; x are the final states over the cache."""
    B, T, D = exact.shape
    rows = B * (T - first)
    size = min(_ROWS, rows)

    def in_blocks(x: Float[Array, "B T D"]) -> Float[Array, "n rows D"]:
        x = finish(config, ends["norm"], Hidden.of(x))[:, first:].reshape(rows, D)
        return jnp.pad(x, ((0, -rows % size), (0, 0))).reshape(-1, size, D)

    @jax.checkpoint
    def of_block(block):
        expected, found = (jax.nn.log_softmax(logits(config, ends, x)) for x in block)
        return (jnp.exp(expected) * (expected - found)).sum(-1)

    return jax.lax.map(of_block, (in_blocks(exact), in_blocks(x))).ravel()[:rows]


def _damped(config: ModelConfig, ends: Params, first: int, exact, x, typical):
    """The damped KL, and the KL itself."""
    kl = _kl_of_tokens(config, ends, first, exact, x)
    return (typical * jnp.log1p(jnp.maximum(kl, 0) / typical)).mean(), kl.mean()


_how = {"static_argnums": (0, 2), "compiler_options": ALIKE}
_mean_kl = jax.jit(lambda *compared: _kl_of_tokens(*compared).mean(), **_how)
_damped_and_gradient = jax.jit(jax.value_and_grad(_damped, argnums=4, has_aux=True), **_how)
