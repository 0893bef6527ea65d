"""Rotations from second moments, in float64: OSCAR's, ours, and SAW-INT4's Hessian one.

Row vectors: x R is stored. Eigenvectors stand in columns by descending eigenvalue, each with its
entry of largest magnitude positive, so that the same moments give the same rotation.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jkvq.cache.fixed_rotations import bit_reversal, block_hadamard, hadamard

FACTORS = ("eigenvectors", "hadamard", "bit-reversal")
_DAMPING = 0.01  # of the mean diagonal, added to the Hessian's


class Eigen(NamedTuple):
    """Eigenvalues, descending, and eigenvectors in columns."""

    values: Float[np.ndarray, "*heads H"]
    vectors: Float[np.ndarray, "*heads H H"]


def eigen(second: Float[np.ndarray, "*heads H H"]) -> Eigen:
    """The eigenvectors of symmetric matrices, in canonical order and with canonical signs."""
    values, vectors = np.linalg.eigh(second)
    values, vectors = values[..., ::-1], vectors[..., ::-1]
    largest = np.abs(vectors).argmax(-2)[..., None, :]
    signs = np.sign(np.take_along_axis(vectors, largest, axis=-2))
    return Eigen(values, vectors * signs)


def oscar(
    second: Float[np.ndarray, "*heads H H"], without: Collection[str] = ()
) -> Float[np.ndarray, "*heads H H"]:
    """R = U Had P_br, or what is left of it without some of its factors."""
    H = second.shape[-1]
    R = np.broadcast_to(np.eye(H), second.shape)
    if "eigenvectors" not in without:
        R = eigen(second).vectors
    if "hadamard" not in without:
        R = R @ hadamard(H)
    if "bit-reversal" not in without:
        R = R[..., bit_reversal(H)]  # the reversal is its own inverse
    return R


def balanced(
    stored: Float[np.ndarray, "*heads H H"],
    reading: Float[np.ndarray, "*heads H H"],
    damping: float,
) -> tuple[Float[np.ndarray, "*heads H H"], Float[np.ndarray, "*heads H"]]:
    """M that makes least of a coding error, and the variance it leaves in each channel, falling.

    A token x, of second moment C, is stored as x M and read by y M^-T, y of second moment E. A code
    errs in all channels alike and in proportion to x M, so that y reads an error in proportion to
    tr(M^T C M) tr(M^-1 E M^-T). That is least for M M^T = P with P C P = E, the geometric mean of
    C^-1 and E. M = P^(1/2) U: the two moments are one and the same behind P^(1/2), and U are its
    eigenvectors. Any rotation behind M is as good: one that mixes channels makes them alike.
    """
    C, E = _damped(stored, damping), _damped(reading, damping)
    root, inverse = _power(C, 0.5), _power(C, -0.5)
    half = _power(inverse @ _power(root @ E @ root, 0.5) @ inverse, 0.5)
    half = half / np.exp(np.linalg.slogdet(half)[1] / half.shape[-1])[..., None, None]
    values, vectors = eigen(half @ C @ half)
    return half @ vectors, values


def _power(second: np.ndarray, exponent: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(second)
    return (vectors * values[..., None, :] ** exponent) @ vectors.swapaxes(-1, -2)


def _damped(second: np.ndarray, part: float) -> np.ndarray:
    """With a part of the mean diagonal added to the diagonal."""
    mean = np.diagonal(second, axis1=-2, axis2=-1).mean(-1)
    return second + part * mean[..., None, None] * np.eye(second.shape[-1])


def hessian(queries: Float[np.ndarray, "L K H H"], order: int) -> Float[np.ndarray, "L K H H"]:
    """R = U Had_b with the eigenvectors of a layer's damped C_Q; the same for all its heads."""
    H = queries.shape[-1]
    U = eigen(_damped(queries.mean(1), _DAMPING)).vectors
    return np.broadcast_to((U @ block_hadamard(H, order))[:, None], queries.shape)


def shared(second: Float[np.ndarray, "L K H H"]) -> Float[np.ndarray, "L K H H"]:
    """The mean over a layer's KV heads, for each of them."""
    return np.broadcast_to(second.mean(1, keepdims=True), second.shape)
