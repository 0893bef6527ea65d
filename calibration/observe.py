"""One pass over a text that keeps means and second moments, never the activations.

The text is cut into windows, each a sequence of its own; its sums of each layer are added up in
float64 on the host. Memory does not grow with the text, unless keys and values are
captured.

A window is short beside the context that a cache serves, and slow rotary pairs have hardly rotated
at its end: keys from later on lie elsewhere. Scores depend on distances alone, so a token's queries
and keys count as if it stood elsewhere with all that it sees: tokens are placed evenly over the
context, but for a window's first ones, which are a sequence's first wherever it ends.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jkvq.cache.specs.page_rule import Windows
from jkvq.calibration.moments import Captured, Moments, Read
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params, embed, run_layer
from jkvq.pallas_kernels.reference.dense_attention import causal, products, softmax, weighted_sum
from jkvq.pallas_kernels.rotary import angles, rotate
from jkvq.support.progress import count_bar

WINDOW = 2048  # tokens
# Of most caches that are calibrated: tokens that left them have moments of their own.
WINDOWS = Windows(sink=64, recent=256, page=64)
_BLOCKS = 4  # of a window's queries: a third less work, and a quarter of the memory
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it, without their whole parts, leave no gaps


def observe(
    config: ModelConfig,
    params: Params,
    tokens: Sequence[int],
    *,
    window: int = WINDOW,
    context: int,
    windows: Windows = WINDOWS,
    leading: int = 0,
    capture: bool = False,
) -> tuple[Moments, Captured | None]:
    """The moments, in float64, of a text that is cut into windows; keys and values if asked for.

    Args:
        config, params: the model.
        tokens: the text.
        window: how many tokens see each other.
        context: how many positions tokens are placed over.
        windows: of the caches to serve.
        leading: how many of the first tokens begin every window; see ``sequences``.
        capture: whether to give back keys and values, where they stand in their windows.
    """
    total, kept, count_all = None, [], 0
    with count_bar("Reading the text", len(tokens)) as bar:
        for index, (chunk, count) in enumerate(sequences(tokens, window, leading)):
            stand = jnp.asarray(place_tokens(index, chunk.shape[1], context, windows.sink))
            new = int(count) - (leading if index else 0)
            done = functools.partial(bar.advance, new / config.layers)
            sums, activations = _observe_sequence(
                config, params, windows, chunk, count, stand, capture=capture, done=done
            )
            sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
            # They were taken about the window's means, as float32 would lose the rest beside them.
            means = sums.k_mean_in_page / int(count), sums.v_mean / int(count)
            read, packed = (x.moved(*means) for x in (sums.read, sums.packed))
            sums = dataclasses.replace(sums, read=read, packed=packed)
            total = sums if total is None else jax.tree.map(np.add, total, sums)
            kept.append([np.asarray(x)[:, : int(count)] for x in activations])
            count_all += int(count)
    moments = jax.tree.map(lambda x: x / count_all, total)
    if not capture:
        return moments, None
    return moments, Captured(*(np.concatenate(side, axis=1) for side in zip(*kept, strict=True)))


def place_tokens(index: int, width: int, context: int, first: int) -> Int[np.ndarray, " T"]:
    """Where the tokens of a window of this width stand, the ``first`` ones where they are."""
    position = np.arange(width)
    part = (index * width + position) * _GOLDEN % 1.0
    anywhere = first + np.floor(part * max(context - first, 0))
    return np.where(position < first, position, anywhere).astype(np.int32)


def sequences(
    tokens: Sequence[int], window: int, leading: int = 0
) -> Iterator[tuple[Int[Array, "1 T"], Int[Array, ""]]]:
    """The windows of a text as (tokens, how many are real), all of one T.

    Every one is a sequence of its own, and begins as the sequences that a cache serves do: with the
    ``leading`` first tokens, BOS where the model's prompts have it. Later ones hold the less of
    the text.
    """
    width = min(window, len(tokens))
    for start in range(leading, len(tokens), width - leading):
        part = [*tokens[:leading], *tokens[start : start + width - leading]]
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(part)] = part
        yield jnp.asarray(padded), jnp.asarray(len(part), jnp.int32)


class _Places(NamedTuple):
    """Of the tokens of a window: what all layers share."""

    real: Bool[Array, " T"]
    unrotate: tuple[Array, Array]  # (cos, sin) that take the rotary embedding off keys
    away: tuple[Array, Array]  # (cos, sin) from their position to where they stand
    in_page: tuple[Array, Array]  # (cos, sin) of the middle of the page that they stand in
    page: Int[Array, " T"]  # by position; those of the sink have none
    packed_pages: Int[Array, " T"]  # how many a query reads packed
    number: Int[Array, " P"]  # of all pages


@functools.partial(jax.jit, static_argnames=("config", "windows"))
def _places(config: ModelConfig, windows: Windows, count, stand: Int[Array, " T"]) -> _Places:
    T = len(stand)
    position = jnp.arange(T, dtype=jnp.int32)
    turn = functools.partial(angles, jnp.asarray(config.rope_frequency))
    cos, sin = turn(position[None])
    middle_cos, middle_sin = turn(windows.middle(stand)[None])
    return _Places(
        real=position < count,
        unrotate=(cos, -sin),
        away=turn((stand - position)[None]),
        in_page=(middle_cos[0], middle_sin[0]),
        page=windows.page_number(position) - windows.sink_pages,
        packed_pages=windows.packed(position + 1) // windows.page,
        number=jnp.arange(T // windows.page + 1),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Observing:
    """Attention over the text itself, whose state is the layer's sums; and k, v if captured.

    window: how many of the latest tokens the layer sees, None where it sees all.
    """

    places: _Places
    scale: float = field(metadata={"static": True})
    window: int | None = field(metadata={"static": True})
    capture: bool = field(metadata={"static": True})

    def __call__(self, q, k, v, state, sinks=None):
        del state
        q, k, v = (heads.finished for heads in (q, k, v))
        how = {"scale": self.scale, "window": self.window, "sinks": sinks}
        out, sums = _sums(self.places, q, k, v, **how)
        kept = (k[0].astype(jnp.float32), v[0].astype(jnp.float32)) if self.capture else ()
        return out.astype(q.dtype), (sums, kept)


def _observe_sequence(
    config: ModelConfig,
    params: Params,
    windows: Windows,
    tokens: Int[Array, "1 T"],
    count: Int[Array, ""],
    stand: Int[Array, " T"],
    *,
    capture: bool,
    done: Callable[[], None],
) -> tuple[Moments, tuple[np.ndarray, ...]]:
    """Sums over a window's tokens, means over query heads, stacked over layers; and k, v.

    ``done`` is called after each layer.
    """
    kinds = {config.layer(layer) for layer in range(config.layers)}
    attend = {
        kind: _Observing(
            _places(kind, windows, count, stand), kind.attention_scale, kind.window, capture
        )
        for kind in kinds
    }
    position, found = np.arange(tokens.shape[1], dtype=np.int32)[None], []
    hidden, rotary = embed(config, params["embedding"], tokens, position)
    for layer in range(config.layers):
        own, weights = config.layer(layer), params["layers"][layer]
        hidden, of_layer = run_layer(own, weights, hidden, rotary, attend[own], None)
        found.append(jax.tree.map(np.asarray, of_layer))
        done()
    return jax.tree.map(lambda *layers: np.stack(layers), *found)


class _Attention(NamedTuple):
    """What a layer's queries and keys make of each other."""

    out: Float[Array, "T K G H"]  # S v
    received: Float[Array, "T K G H"]  # S^T q
    given: Float[Array, "T K G"]  # the scores that a query gives to packed tokens
    taken: Float[Array, "T K"]  # the scores that a token receives, means over query heads
    taken_packed: Float[Array, "T K"]  # the same once it is packed


def _attention(
    places: _Places, q: Float[Array, "T N H"], k, v, *, scale: float, window: int | None, sinks
) -> _Attention:
    """Attention, and its scores added up by pages in the products that read them anyway."""
    T, N, H = q.shape
    K = k.shape[1]
    G = N // K
    number, page, packed_pages = places.number[None], places.page, places.packed_pages
    visible = causal(jnp.arange(T, dtype=jnp.int32), T, window) & places.real[None]
    of_page = (page[:, None] == number).astype(jnp.float32)
    of_step = ((packed_pages[:, None] == number) & places.real[:, None]).astype(jnp.float32)
    of_page = jnp.broadcast_to(of_page[:, None], (T, K, number.size))
    of_step = jnp.broadcast_to(of_step[:, None, None], (T, K, G, number.size))
    read = jnp.concatenate([v, of_page], -1)
    asked = jnp.concatenate([q.reshape(T, K, G, H), of_step], -1)
    outs, back = [], jnp.zeros(asked.shape)
    size = -(-T // _BLOCKS)
    for start in range(0, T, size):  # queries see nothing behind their block's end
        stop = min(start + size, T)
        logits = products(q[start:stop] * scale, k[:stop])
        S, _ = softmax(logits, visible[start:stop, :stop], sinks)
        outs.append(weighted_sum(S, read[:stop]))
        given = jnp.einsum("kgts,tkgh->skgh", S, asked[start:stop], precision="highest")
        back = back.at[:stop].add(given)
    out = jnp.concatenate(outs).reshape(T, K, G, -1)
    by_page, by_step = out[..., H:], back[..., H:].sum(2) / G
    # A query reads page j packed if j < packed_pages.
    given = jnp.where((number < packed_pages[:, None])[:, None, None], by_page, 0.0)
    packed = (page[:, None] >= 0) & (page[:, None] < number)
    taken = jnp.where(packed[:, None], by_step, 0.0)
    return _Attention(out[..., :H], back[..., :H], given.sum(-1), by_step.sum(-1), taken.sum(-1))


def _sums(places: _Places, q, k, v, **how) -> tuple[Array, Moments]:
    shape, K, weight = q.shape, k.shape[2], places.real.astype(jnp.float32)
    before_rope = rotate(k.astype(jnp.float32), *places.unrotate)[0]
    q, k, v = (x[0].astype(jnp.float32) for x in (q, k, v))
    q = q * weight[:, None, None]
    found = _attention(places, q, k, v, **how)
    q = q.reshape(found.out.shape)
    q, k, received = (_rotated(x, places.away) for x in (q, k, found.received))
    every = jnp.broadcast_to(weight[:, None], (len(weight), K))
    real_out = found.out * weight[:, None, None, None]
    cos, sin = places.in_page
    k_mean_in_page, v_mean = _first(rotate(k, cos, -sin), every), _first(v, every)
    count = weight.sum()
    keys = _beside(k - rotate(k_mean_in_page[None] / count, cos, sin), cos, sin)
    values = _beside(v - v_mean[None] / count, jnp.ones((len(weight), 1)))

    def read(q, taken) -> Read:
        """Of queries by the square root of the scores that they give, keys by what they receive."""
        return Read(_over_heads(q), _second(keys, taken), _second(values, taken))

    moments = Moments(
        qq=_over_heads(q),
        sq=_over_heads(received),
        kk=_second(k, every),
        vv=_second(v, every),
        output=_over_heads(real_out),
        k_mean=_first(k, every),
        k_mean_before_rope=_first(before_rope, every),
        k_mean_in_page=k_mean_in_page,
        v_mean=v_mean,
        output_mean=_first(real_out.mean(2), every),
        read=read(q, found.taken),
        packed=read(q * jnp.sqrt(found.given[..., None]), found.taken_packed),
    )
    return found.out.reshape(shape), moments


def _rotated(x: Float[Array, "T *heads H"], by: tuple[Array, Array]) -> Float[Array, "T *heads H"]:
    T, *_, H = x.shape
    return rotate(x.reshape(1, T, -1, H), *by).reshape(x.shape)


def _over_heads(x: Float[Array, "T K G H"]) -> Float[Array, "K H H"]:
    """x^T x over tokens, mean over query heads."""
    return jnp.einsum("tkgh,tkgi->khi", x, x, precision="highest") / x.shape[2]


def _second(x: Float[Array, "T K H"], weight: Float[Array, "T K"]) -> Float[Array, "K H H"]:
    return jnp.einsum("tkh,tk,tki->khi", x, weight, x, precision="highest")


def _first(x: Float[Array, "T K H"], weight: Float[Array, "T K"]) -> Float[Array, "K H"]:
    return jnp.einsum("tkh,tk->kh", x, weight, precision="highest")


def _beside(x: Float[Array, "T K H"], *numbers: Float[Array, "T _"]) -> Float[Array, "T K _"]:
    """x of each token with numbers that are the same for all heads."""
    each = (jnp.broadcast_to(y[:, None], (*x.shape[:2], y.shape[-1])) for y in numbers)
    return jnp.concatenate([x, *each], axis=-1)
