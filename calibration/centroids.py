"""K-means over a layer's tokens: k-means++, then Lloyd's iteration; the best of some starts."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_ROUNDS = 50  # of Lloyd's iteration, at most
_ENOUGH = 1e-3  # a round that gains less than this part of the error is the last
_CHUNK_DISTANCES = 2**25  # in memory at a time


@functools.partial(jax.jit, static_argnames=("count", "starts"))
def kmeans(
    x: Float[Array, "T D"], count: int, *, seed: int = 0, starts: int = 3
) -> Float[Array, "C D"]:
    """The centroids with the least squared error among some starts."""
    keys = jax.random.split(jax.random.key(seed), starts)
    found, errors = jax.lax.map(lambda key: _lloyd(x, _plus_plus(x, count, key)), keys)
    return found[errors.argmin()]


def _plus_plus(x: Float[Array, "T D"], count: int, key) -> Float[Array, "C D"]:
    """k-means++: each next centre is a token, by chance of its squared distance to those before."""

    def draw(distance, key):
        even = jnp.isinf(distance).all()  # the first one
        chosen = x[jax.random.categorical(key, jnp.where(even, 0.0, jnp.log(distance)))]
        nearer = jnp.minimum(distance, ((x - chosen[None]) ** 2).sum(-1))
        return nearer, chosen

    return jax.lax.scan(draw, jnp.full(len(x), jnp.inf), jax.random.split(key, count))[1]


def _lloyd(x: Float[Array, "T D"], start: Float[Array, "C D"]):
    """Moves centres to the mean of their tokens until the error hardly falls."""

    def improves(state):
        _, error, before, done = state
        return (done < _ROUNDS) & (before - error > _ENOUGH * before)

    def move(state):
        centres, before, _, done = state
        centres, error = _means(x, centres)
        return centres, error, before, done + 1

    infinite = jnp.asarray(jnp.inf)
    state = (start, infinite, infinite, jnp.asarray(0))
    state = move(move(state))  # an error to compare with
    centres, _, _, _ = jax.lax.while_loop(improves, move, state)
    return centres, _means(x, centres)[1]


def _means(x: Float[Array, "T D"], centres: Float[Array, "C D"]):
    """The mean of the tokens nearest to each centre, or it where there are none; and the error."""
    T, C = len(x), len(centres)
    chunk = max(1, min(T, _CHUNK_DISTANCES // C))
    chunks = -(-T // chunk)
    real = jnp.arange(chunks * chunk) < T
    padded = jnp.pad(x, ((0, chunks * chunk - T), (0, 0)))

    def add(state, part):
        total, count, error = state
        x, real = part
        index, distance = nearest(x, centres)
        # A product, not a scatter, whose sums would come in any order on a GPU.
        member = jax.nn.one_hot(index, C, dtype=jnp.float32) * real[:, None]
        total = total + jnp.einsum("tc,td->cd", member, x, precision="highest")
        return (total, count + member.sum(0), error + (distance * real).sum()), None

    parts = (padded.reshape(chunks, chunk, -1), real.reshape(chunks, chunk).astype(jnp.float32))
    state = (jnp.zeros_like(centres), jnp.zeros(C), jnp.array(0.0))
    total, count, error = jax.lax.scan(add, state, parts)[0]
    means = total / jnp.maximum(count, 1.0)[:, None]
    return jnp.where(count[:, None] > 0, means, centres), error


def nearest(
    x: Float[Array, "T D"], centres: Float[Array, "C D"]
) -> tuple[Int[Array, " T"], Float[Array, " T"]]:
    """The index of each token's nearest centre and its squared distance."""
    product = jnp.einsum("td,cd->tc", x, centres, precision="highest")
    distance = (centres**2).sum(-1)[None] - 2 * product
    index = distance.argmin(-1)
    least = distance.min(-1) + (x**2).sum(-1)
    return index, jnp.maximum(least, 0.0)
