"""What is learned of a calibration: rotations, stretches and means, as changes of a start.

A balanced rotation M0 becomes M = M0 P D Q with P, Q orthogonal and D a positive diagonal: any
matrix whose determinant has M0's sign can be written so. P and Q are exponentials of antisymmetric
matrices, and the logarithms in D stay between bounds, so that the condition number grows by a
bounded factor. All of it is 0 at the start.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jkvq.cache.basis import mixing
from jkvq.cache.calibrated import Calibration, SideCalibration, Transform
from jkvq.cache.specs.spec import CacheSpec

_MOST_STRETCH = math.log(4.0)
_HALVINGS, _POWERS = 5, 8  # exact to float32's last digits for angles up to 32

Matrix = Float[Array, "L K H H"]
Vector = Float[Array, "L K H"]


class Learned(NamedTuple):
    """Of one side of every layer; 0 changes nothing."""

    before: Matrix  # of P = exp(A): A is half of it less its transpose
    stretch: Vector
    behind: Matrix  # of Q, alike
    mean: Vector  # in standard deviations of each channel


class Start(NamedTuple):
    """What it changes, of one side of every layer."""

    mean: Vector
    deviation: Vector  # of every channel about the mean
    rotation: Matrix  # M0
    dual: Matrix  # M0^-T
    mixing: Matrix  # what the cache does behind M (basis.py)
    mixing_dual: Matrix


class Turned(NamedTuple):
    """What the cache does to tokens before they are coded, of one side."""

    mean: Float[Array, "*L K H"]
    rotation: Float[Array, "*L K H H"]
    dual: Float[Array, "*L K H H"]


Sides = dict[str, Learned]


def starting_from(calibration: Calibration, spec: CacheSpec, layers: int) -> dict[str, Start]:
    """The start of keys and of values for a cache."""
    return {
        name: _start(getattr(calibration, name).transform(spec), name, spec, layers)
        for name in ("key", "value")
    }


def _start(transform: Transform, name: str, spec: CacheSpec, layers: int) -> Start:
    assert transform.mean is not None
    assert transform.rotation is not None
    assert transform.spread is not None
    M, spread = (np.asarray(x, np.float64) for x in (transform.rotation, transform.spread))
    dual = _dual(M)
    shape = M.shape[1:]
    mixed = np.stack(
        [
            np.broadcast_to(mixing(spread[layer], getattr(spec.of_layer(layer), name)), shape)
            for layer in range(layers)
        ]
    )
    variance = np.einsum("lkhi,lki,lkhi->lkh", dual, spread, dual)  # M^-T diag(spread) M^-1
    arrays = transform.mean, np.sqrt(variance), M, dual, mixed, _dual(mixed)
    return Start(*(jnp.asarray(x, jnp.float32) for x in arrays))


def _dual(M: np.ndarray) -> np.ndarray:
    return np.linalg.inv(M).swapaxes(-1, -2)


def unchanged(start: dict[str, Start]) -> Sides:
    """Nothing learned yet."""
    return {
        name: Learned(*(jnp.zeros_like(side[i]) for i in (2, 0, 2, 0)))
        for name, side in start.items()
    }


def turned(start: Start, learned: Learned) -> Turned:
    """What the cache of a learned calibration does to tokens."""
    P, Q = (_exponential(x) for x in (learned.before, learned.behind))
    stretch = _stretch(learned.stretch)[..., None, :]

    def matrix(M: Matrix, stretch, mixing: Matrix) -> Matrix:
        return _product(_product(_product(M, P) * stretch, Q), mixing)

    return Turned(
        start.mean + start.deviation * learned.mean,
        matrix(start.rotation, jnp.exp(stretch), start.mixing),
        matrix(start.dual, jnp.exp(-stretch), start.mixing_dual),
    )


def _stretch(learned: Vector) -> Vector:
    """Logarithms between the bounds, 0 on average: what all have in common changes nothing."""
    learned = learned - learned.mean(-1, keepdims=True)
    return _MOST_STRETCH * jnp.tanh(learned / _MOST_STRETCH)


def _product(a: Matrix, b: Matrix) -> Matrix:
    return jnp.matmul(a, b, precision="highest")


def _exponential(x: Matrix) -> Matrix:
    """exp(A), by powers of A / 2^n: products alone, which GPUs and CPUs have fast programs for."""
    A = (x - x.swapaxes(-1, -2)) / 2
    one = jnp.broadcast_to(jnp.eye(A.shape[-1]), A.shape)
    small, total = A / 2**_HALVINGS, one
    for power in range(_POWERS, 0, -1):
        total = one + _product(small, total) / power
    for _ in range(_HALVINGS):
        total = _product(total, total)
    return total


def with_learned(
    calibration: Calibration, spec: CacheSpec, start: dict[str, Start], learned: Sides
) -> Calibration:
    """The calibration in which what serves this cache is as learned."""

    def side(name: str) -> SideCalibration:
        found, own = getattr(calibration, name), start[name]
        now = jax.jit(turned)(own, learned[name])
        M = np.asarray(now.rotation, np.float64) @ np.linalg.inv(np.asarray(own.mixing, np.float64))
        place = "past_windows" if spec.windowed else "all_tokens"
        transform = dataclasses.replace(
            getattr(found, place),
            mean=np.asarray(now.mean, np.float32),
            rotation=np.ascontiguousarray(M, np.float32),
            spread=found.transform(spec).spread,
        )
        return dataclasses.replace(found, **{place: transform})

    return dataclasses.replace(calibration, key=side("key"), value=side("value"))
