"""Means and second moments of queries, keys and values: what calibration keeps of a text.

Keys are stored about a mean that stands in the middle of their page (basis.py): their second
moments keep the angles of these middles beside them, and can be taken about any such mean later.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float


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
        return _moved(self.kk, -_rotations(self.k_mean))[..., :H, :H]

    @property
    def v_covariance(self) -> Float[Any, "L K H H"]:
        return _moved(self.vv, -self.v_mean[..., None])[..., :-1, :-1]

    def moved(self, k: Float[Any, "L K H"], v: Float[Any, "L K H"]) -> "Read":
        """These where values are larger by v, and keys by k in the middle of their pages."""
        return Read(self.qq, _moved(self.kk, _rotations(k)), _moved(self.vv, v[..., None]))


def _rotations(mean: Float[np.ndarray, "*n H"]) -> Float[np.ndarray, "*n H H"]:
    """The matrix that takes (cos, sin) of an angle for each pair to the mean rotated by them."""
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

    Queries and keys are those of tokens placed over the context. S are the causal softmax scores of
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
    packed: Read  # weighted by S where the token would have left the 16-bit windows

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
