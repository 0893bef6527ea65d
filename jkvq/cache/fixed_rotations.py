"""Rotations of a head's channels: orthogonal matrices R, applied to row vectors as x R."""

import functools

import numpy as np


def hadamard(order: int) -> np.ndarray:
    """The normalised Walsh-Hadamard matrix of a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(order)


def block_hadamard(head_dim: int, order: int) -> np.ndarray:
    """Block-diagonal, head_dim / order copies of the Hadamard matrix."""
    return np.kron(np.eye(head_dim // order), hadamard(order))


def bit_reversal(order: int) -> np.ndarray:
    """Where each index below a power of two goes when its bits are read backwards."""
    bits = order.bit_length() - 1
    return np.array([int(f"{i:0{bits}b}"[::-1], 2) if bits else 0 for i in range(order)])


@functools.lru_cache(maxsize=64)
def random_rotation(size: int, seed: int) -> np.ndarray:
    """A rotation drawn uniformly (Haar), the same for the same size and seed."""
    normal = np.random.default_rng([seed, size]).standard_normal((size, size))
    q, r = np.linalg.qr(normal)
    return q * np.sign(np.diag(r))


def fixed_rotation(name: str, head_dim: int, seed: int) -> np.ndarray:
    """The rotation [H, H] of a name that needs no calibration."""
    if name == "random":
        return random_rotation(head_dim, seed)
    if name == "saw":  # the largest power of two up to 128 that divides the head
        return block_hadamard(head_dim, min(128, head_dim & -head_dim))
    order = head_dim if name == "hadamard" else int(name.removeprefix("bdr"))
    return block_hadamard(head_dim, order)
