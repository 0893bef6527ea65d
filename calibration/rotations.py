"""Rotations from second moments, in float64: OSCAR's, ours ("balanced"), SAW-INT4's Hessian one.

A second moment of vectors x is the mean of x^T x. Vectors are rows: x R is stored. Eigenvectors
stand in the columns of U by descending eigenvalue, each with its entry of largest magnitude
positive, so that the same moments give the same rotation.
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
    """OSCAR's R = U Had P_br; ``without`` leaves out some of the three factors.

    U are the eigenvectors of the second moment, Had is the Hadamard matrix of a head, and P_br puts
    channels in bit-reversed order, which spreads large eigenvalues over groups of channels.
    """
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
    """The invertible M with the least error of scores, and the variance along each column of x M.

    A vector x is stored as x M and read by a query y as (x M) . (y M^-T) = x . y. Let C be the
    second moment of x and E that of y. Coding adds an error of the same size to all channels, in
    proportion to the size of x M; so the error of x . y has a mean square in proportion to

        tr(M^T C M) tr(M^-1 E M^-T).

    It is least for M M^T = P with P C P = E: P is the geometric mean of C^-1 and E. Here
    M = P^(1/2) U. After P^(1/2) x and y have the same second moment, and U are its eigenvectors, by
    falling variance. Any orthogonal matrix may follow M; a Hadamard makes the channels alike.

    Args:
        stored: C, of keys or values.
        reading: E, of what reads them: queries, or the rows of the output projection.
        damping: the part of its mean diagonal that is added to the diagonal of each.
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
    """SAW-INT4's R = U Had_b: eigenvectors of a layer's queries, then block Hadamard of an order.

    U are those of the mean over heads of the queries' second moments, damped; all heads share R.
    """
    H = queries.shape[-1]
    U = eigen(_damped(queries.mean(1), _DAMPING)).vectors
    return np.broadcast_to((U @ block_hadamard(H, order))[:, None], queries.shape)


def shared(second: Float[np.ndarray, "L K H H"]) -> Float[np.ndarray, "L K H H"]:
    """Every KV head gets the mean over the heads of its layer."""
    return np.broadcast_to(second.mean(1, keepdims=True), second.shape)
