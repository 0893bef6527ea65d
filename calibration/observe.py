"""One pass over a text that keeps means and second moments, never the activations.

The text is cut into windows, each a sequence of its own; a window is one jitted step, and its sums
are added up in float64 on the host. Memory does not grow with the text, unless keys and values are
captured.

A window is short beside the context that a cache serves, and slow rotary pairs have hardly turned
at its end: keys from later on lie elsewhere. Scores depend on distances alone, so a token's queries
and keys count as if it stood elsewhere with all that it sees: tokens are spread evenly over the
context, but for a window's first ones, which are a sequence's first wherever it ends.

Keys are stored about a mean that stands in the middle of their page (basis.py): their second
moments keep the angles of these middles beside them, and can be taken about any such mean later.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jkvq.cache.presets import PRESETS
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params, rotary_angles, run
from jkvq.pallas_kernels.rotary import rotate
from jkvq.support.progress import count_bar

WINDOW = 2048  # tokens
WINDOWED = PRESETS["jkvq-int2"].spec
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it, without their whole parts, leave no gaps


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Read:
    """Means as in ``Moments``, weighted by scores: q's by those it gives, k's and v's received."""

    qq: Float[Any, "L K H H"]
    kk: Float[Any, "L K 2H 2H"]  # of (k, cos, sin), the angles those of the middle of k's page
    vv: Float[Any, "L K H+1 H+1"]  # of (v, 1)

    @property
    def weight(self) -> Float[Any, "L K"]:
        """The scores that a query gives."""
        return self.vv[..., -1, -1]

    @property
    def k_mean(self) -> Float[Any, "L K H"]:
        """Of keys, as if the middles of their pages stood at 0."""
        H = self.qq.shape[-1]
        by_cos, by_sin = np.split(self.kk[..., :H, H:], 2, axis=-1)
        (a, c), (b, d) = (
            (np.diagonal(half, axis1=-2, axis2=-1) for half in np.split(x, 2, axis=-2))
            for x in (by_cos, by_sin)
        )
        return np.concatenate([a + d, c - b], axis=-1) / self.weight[..., None]

    @property
    def v_mean(self) -> Float[Any, "L K H"]:
        return self.vv[..., :-1, -1] / self.weight[..., None]

    @property
    def k_covariance(self) -> Float[Any, "L K H H"]:
        """Of keys about their mean, which stands in the middle of their pages."""
        H = self.qq.shape[-1]
        return _moved(self.kk, -_turns(self.k_mean))[..., :H, :H]

    @property
    def v_covariance(self) -> Float[Any, "L K H H"]:
        return _moved(self.vv, -self.v_mean[..., None])[..., :-1, :-1]

    def moved(self, k: Float[Any, "L K H"], v: Float[Any, "L K H"]) -> "Read":
        """These where values are larger by v, and keys by k in the middle of their pages."""
        return Read(self.qq, _moved(self.kk, _turns(k)), _moved(self.vv, v[..., None]))


def _turns(mean: Float[np.ndarray, "*n H"]) -> Float[np.ndarray, "*n H H"]:
    """The matrix that takes (cos, sin) of an angle for each pair to the mean turned by them."""
    a, b = (x[..., None] * np.eye(x.shape[-1]) for x in np.split(mean, 2, axis=-1))
    return np.concatenate([np.concatenate([a, -b], -1), np.concatenate([b, a], -1)], axis=-2)


def _moved(second: Float[np.ndarray, "*n I I"], by: Float[np.ndarray, "*n H J"]):
    """The second moment of (x + by f, f) from that of (x, f), where I = H + J."""
    H, I = by.shape[-2], second.shape[-1]
    change = np.zeros((*by.shape[:-2], I, I)) + np.eye(I)
    change[..., :H, H:] = by
    return change @ second @ change.swapaxes(-1, -2)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Moments:
    """Means over tokens, and over the query heads of a KV head where there are queries.

    Queries and keys are those of tokens spread over the context. S are the causal softmax scores of
    a window.
    """

    qq: Float[Any, "L K H H"]  # C_Q: q^T q
    sq: Float[Any, "L K H H"]  # C_SQ: (S^T q)^T (S^T q), the queries as a key receives them
    kk: Float[Any, "L K H H"]  # k^T k
    vv: Float[Any, "L K H H"]  # v^T v
    output: Float[Any, "L K H H"]  # C_S: (S v)^T (S v)
    k_mean: Float[Any, "L K H"]
    k_mean_before_rope: Float[Any, "L K H"]
    k_mean_in_page: Float[Any, "L K H"]  # as if the middles of their pages stood at 0
    v_mean: Float[Any, "L K H"]
    output_mean: Float[Any, "L K H"]
    read: Read  # weighted by S
    packed: Read  # weighted by S where the token would have left the windows of ``WINDOWED``

    @property
    def q_energy(self) -> Float[Any, "L K H/2"]:
        """E |q_i|^2 of each rotary block i, the channels i and i + H/2."""
        return _block_energy(self.qq)

    @property
    def k_energy(self) -> Float[Any, "L K H/2"]:
        """E |k_i|^2 of each rotary block."""
        return _block_energy(self.kk)


def _block_energy(second: np.ndarray) -> np.ndarray:
    first, last = np.split(np.diagonal(second, axis1=-2, axis2=-1), 2, axis=-1)
    return first + last


class Captured(NamedTuple):
    """Keys and values of a whole text."""

    key: Float[np.ndarray, "L T K H"]
    value: Float[np.ndarray, "L T K H"]


def observe(
    config: ModelConfig,
    params: Params,
    tokens: Sequence[int],
    *,
    window: int = WINDOW,
    context: int,
    capture: bool = False,
) -> tuple[Moments, Captured | None]:
    """The moments, in float64, of a text that is cut into windows; keys and values if asked for.

    Args:
        config, params: the model.
        tokens: the text.
        window: how many tokens see each other.
        context: how many positions tokens are spread over.
        capture: whether to give back keys and values, where they stand in their windows.
    """
    total, kept = None, []
    with count_bar("Reading the text", len(tokens)) as bar:
        for index, (chunk, count) in enumerate(windows(tokens, window)):
            stand = jnp.asarray(spread(index, chunk.shape[1], context))
            sums, activations = _observe_window(
                config, params, chunk, count, stand, capture=capture
            )
            sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
            # They were taken about the window's means, as float32 would lose the rest beside them.
            means = sums.k_mean_in_page / int(count), sums.v_mean / int(count)
            read, packed = (x.moved(*means) for x in (sums.read, sums.packed))
            sums = dataclasses.replace(sums, read=read, packed=packed)
            total = sums if total is None else jax.tree.map(np.add, total, sums)
            kept.append([np.asarray(x)[:, : int(count)] for x in activations])
            bar.advance(int(count))
    moments = jax.tree.map(lambda x: x / len(tokens), total)
    if not capture:
        return moments, None
    return moments, Captured(*(np.concatenate(side, axis=1) for side in zip(*kept, strict=True)))


def spread(index: int, width: int, context: int) -> Int[np.ndarray, " T"]:
    """Where the tokens of a window of this width stand."""
    position, first = np.arange(width), WINDOWED.sink
    turns = (index * width + position) * _GOLDEN % 1.0
    anywhere = first + np.floor(turns * max(context - first, 0))
    return np.where(position < first, position, anywhere).astype(np.int32)


def windows(tokens: Sequence[int], window: int):
    """The windows of a text as ([1, T] tokens, how many are real), all of one T."""
    width = min(window, len(tokens))
    for start in range(0, len(tokens), width):
        part = tokens[start : start + width]
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(part)] = part
        yield jnp.asarray(padded), jnp.asarray(len(part), jnp.int32)


def causal(real: Bool[Array, " T"]) -> Bool[Array, "T T"]:
    """Which tokens a token sees: itself and real ones before it."""
    return jnp.tri(len(real), dtype=bool) & real[None]


def scores(
    q: Float[Array, "T K G H"], k: Float[Array, "T K H"], visible: Bool[Array, "T T"]
) -> Float[Array, "K G T T"]:
    """S: softmax of the scaled products over what is visible."""
    T, K, G, H = q.shape
    # The query heads of a KV head in one product: three times as fast on CPU as side by side.
    rows = q.transpose(1, 2, 0, 3).reshape(K, G * T, H) * H**-0.5
    logits = jnp.einsum("krh,skh->krs", rows, k, precision="highest").reshape(K, G, T, len(k))
    return jax.nn.softmax(jnp.where(visible[None, None], logits, -jnp.inf), axis=-1)


def mixed(S: Float[Array, "K G T S"], v: Float[Array, "S K H"]) -> Float[Array, "T K G H"]:
    """S v."""
    K, G, T, _ = S.shape
    rows = jnp.einsum("krs,skh->krh", S.reshape(K, G * T, -1), v, precision="highest")
    return rows.reshape(K, G, T, -1).transpose(2, 0, 1, 3)


def grouped(q: Float[Array, "1 T N H"], kv_heads: int) -> Float[Array, "T K G H"]:
    """Queries of one sequence, by the KV head they read; float32."""
    _, T, N, H = q.shape
    return q.astype(jnp.float32).reshape(T, kv_heads, N // kv_heads, H)


@functools.partial(jax.jit, static_argnames=("config", "capture"))
def _observe_window(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "1 T"],
    count: Int[Array, ""],
    stand: Int[Array, " T"],
    *,
    capture: bool,
) -> tuple[Moments, tuple[Array, ...]]:
    """Sums over a window's tokens, means over query heads, stacked over layers; and k, v."""
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    real = position[0] < count
    cos, sin = rotary_angles(config, position)
    away = rotary_angles(config, stand[None] - position)
    middle = WINDOWED.middle(stand)
    in_page = tuple(x[0] for x in rotary_angles(config, middle[None]))
    # A query sees the tokens of page j packed if j < steps[t]; those of the sink have no page.
    pages = (position[0] - WINDOWED.sink) // WINDOWED.page
    steps = WINDOWED.packed(position[0] + 1) // WINDOWED.page

    def observing(layer, q, k, v, found):
        before_rope = rotate(k.astype(jnp.float32), cos, -sin)[0]
        out, sums = _sums(q, k, v, before_rope, away, in_page, real, pages, steps)
        kept = (k[0].astype(jnp.float32), v[0].astype(jnp.float32)) if capture else ()
        return out.astype(q.dtype), (*found, (sums, kept))

    _, found = run(config, params, tokens, position, observing, ())
    return jax.tree.map(lambda *layers: jnp.stack(layers), *found)


@jax.jit  # so that it is traced once, and not for every layer
def _sums(q, k, v, before_rope, away, in_page, real, pages, steps) -> tuple[Array, Moments]:
    shape, K, T = q.shape, k.shape[2], q.shape[1]
    weight = real.astype(jnp.float32)
    q = grouped(q, K) * weight[:, None, None, None]
    k, v = (x[0].astype(jnp.float32) for x in (k, v))
    G, H = q.shape[2:]
    S = scores(q, k, causal(real))
    # Scores are summed by pages and steps in the products that read them anyway.
    number = jnp.arange(T // WINDOWED.page + 1)[None]
    of_page, of_step = (jnp.asarray(x[:, None] == number, jnp.float32) for x in (pages, steps))
    of_page = jnp.broadcast_to(of_page[:, None], (T, K, number.size))
    of_step = jnp.broadcast_to((of_step * weight[:, None])[:, None, None], (T, K, G, number.size))
    out = mixed(S, jnp.concatenate([v, of_page], -1))
    back = jnp.einsum("kgts,tkgh->skgh", S, jnp.concatenate([q, of_step], -1), precision="highest")
    out, by_page = out[..., :H], out[..., H:]
    received, by_step = back[..., :H], back[..., H:].sum(2) / G
    # What a query gives to packed tokens, and what a token receives once it is packed
    given = jnp.where((number < steps[:, None])[:, None, None], by_page, 0.0)
    behind = (pages[:, None] >= 0) & (pages[:, None] < number)
    taken = jnp.where(behind[:, None], by_step, 0.0)

    def turned(x):
        return rotate(x.reshape(1, T, -1, H), *away).reshape(x.shape)

    q, k, received = turned(q), turned(k), turned(received)

    def over_heads(x):
        return jnp.einsum("tkgh,tkgi->khi", x, x, precision="highest") / G

    def second(x, weight):
        return jnp.einsum("tkh,tk,tki->khi", x, weight, x, precision="highest")

    def first(x, weight):
        return jnp.einsum("tkh,tk->kh", x, weight, precision="highest")

    every = jnp.broadcast_to(weight[:, None], (len(weight), K))
    real_out = out * weight[:, None, None, None]
    cos, sin = in_page
    k_mean_in_page, v_mean = first(rotate(k, cos, -sin), every), first(v, every)
    count = weight.sum()
    k_left = k - rotate(k_mean_in_page[None] / count, cos, sin)
    v_left = v - v_mean[None] / count

    def beside(x, *numbers):
        """x of each token with numbers that are the same for all heads."""
        each = (jnp.broadcast_to(y[:, None], (T, K, y.shape[-1])) for y in numbers)
        return jnp.concatenate([x, *each], axis=-1)

    keys, values = beside(k_left, cos, sin), beside(v_left, jnp.ones((T, 1)))

    def read(q, received) -> Read:
        """Of queries by the square root of the scores that they give, keys by what they receive."""
        return Read(over_heads(q), second(keys, received), second(values, received))

    moments = Moments(
        qq=over_heads(q),
        sq=over_heads(received),
        kk=second(k, every),
        vv=second(v, every),
        output=over_heads(real_out),
        k_mean=first(k, every),
        k_mean_before_rope=first(before_rope, every),
        k_mean_in_page=k_mean_in_page,
        v_mean=v_mean,
        output_mean=first(real_out.mean(2), every),
        read=read(q, by_step.sum(-1)),
        packed=read(q * jnp.sqrt(given.sum(-1, keepdims=True)), taken.sum(-1)),
    )
    return out.reshape(shape), moments
