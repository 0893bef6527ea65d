"""Rotations from second moments, in float64: OSCAR's, and SAW-INT4's Hessian one.

Row vectors: x R is stored. Eigenvectors stand in columns by descending eigenvalue, each with its
entry of largest magnitude positive, so that the same moments give the same rotation.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jkvq.rotation import block_hadamard, hadamard

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


def bit_reversal(order: int) -> Int[np.ndarray, " H"]:
    """Where each index below a power of two goes when its bits are read backwards."""
    bits = order.bit_length() - 1
    return np.array([int(f"{i:0{bits}b}"[::-1], 2) if bits else 0 for i in range(order)])


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


def hessian(queries: Float[np.ndarray, "L K H H"], order: int) -> Float[np.ndarray, "L K H H"]:
    """R = U Had_b with the eigenvectors of a layer's damped C_Q; the same for all its heads."""
    H = queries.shape[-1]
    M = queries.mean(1)
    damping = _DAMPING * np.diagonal(M, axis1=-2, axis2=-1).mean(-1)
    U = eigen(M + damping[:, None, None] * np.eye(H)).vectors
    return np.broadcast_to((U @ block_hadamard(H, order))[:, None], queries.shape)


def shared(second: Float[np.ndarray, "L K H H"]) -> Float[np.ndarray, "L K H H"]:
    """The mean over a layer's KV heads, for each of them."""
    return np.broadcast_to(second.mean(1, keepdims=True), second.shape)
