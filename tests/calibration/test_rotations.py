import numpy as np
import pytest
import scipy.linalg

from jkvq.cache.fixed_rotations import hadamard
from jkvq.calibration import rotations


def _second(L=2, K=3, H=32, seed=0):
    """Second moments with a wide spectrum."""
    x = np.random.default_rng(seed).standard_normal((L, K, 4 * H, H))
    x = x * 0.8 ** np.arange(H) @ np.linalg.qr(x[0, 0, :H])[0]
    return np.einsum("lkth,lkti->lkhi", x, x) / (4 * H)


def _bit_reversed(index: int, bits: int) -> int:
    return sum((index >> b & 1) << (bits - 1 - b) for b in range(bits))


def test_oscar_is_eigenvectors_hadamard_and_bit_reversal():
    second = _second()
    R = rotations.oscar(second)
    for layer, head in np.ndindex(2, 3):
        # Of a positive matrix the singular vectors are the eigenvectors, largest first.
        U = np.linalg.svd(second[layer, head])[0]
        U = U * np.sign(U[np.abs(U).argmax(0), np.arange(32)])
        mixed = U @ scipy.linalg.hadamard(32) / np.sqrt(32)
        wanted = np.zeros((32, 32))
        for column in range(32):
            wanted[:, _bit_reversed(column, 5)] = mixed[:, column]
        np.testing.assert_allclose(R[layer, head], wanted, atol=1e-9)


def test_oscar_makes_the_diagonal_constant_and_is_orthogonal():
    second = _second()
    R = rotations.oscar(second).astype(np.float32).astype(np.float64)
    turned = np.einsum("lkhi,lkhj,lkjm->lkim", R, second, R)
    diagonal = np.diagonal(turned, axis1=-2, axis2=-1)
    mean = diagonal.mean(-1, keepdims=True)
    np.testing.assert_allclose(diagonal, np.broadcast_to(mean, diagonal.shape), rtol=1e-5)
    product = R @ R.swapaxes(-1, -2)
    np.testing.assert_allclose(product, np.broadcast_to(np.eye(32), R.shape), atol=1e-6)


def test_balanced_shares_both_moments_among_channels_and_none_does_better():
    stored, reading = _second(seed=0), _second(seed=1)
    M, spread = rotations.balanced(stored, reading, 1e-3)
    M = M @ hadamard(32)

    def error(M: np.ndarray) -> np.ndarray:
        """tr(M^T C M) tr(M^-1 E M^-T), by head."""
        inverse = np.linalg.inv(M)
        coded = np.einsum("...hi,...hj,...ji->...", M, stored, M)
        return coded * np.einsum("...ih,...hj,...ij->...", inverse, reading, inverse)

    for layer, head in np.ndindex(2, 3):
        C, E, X = stored[layer, head], reading[layer, head], M[layer, head]
        # The bound, whatever the matrix: the nuclear norm of the product of the moments' roots.
        product = np.linalg.cholesky(C).T @ np.linalg.cholesky(E)
        bound = np.linalg.svd(product)[1].sum() ** 2
        assert bound <= error(M)[layer, head] <= 1.02 * bound  # damping takes the rest
        for moment in (X.T @ C @ X, np.linalg.inv(X) @ E @ np.linalg.inv(X).T):
            np.testing.assert_allclose(np.diag(moment), np.diag(moment).mean(), rtol=0.02)
        assert np.linalg.slogdet(X)[1] == pytest.approx(0, abs=1e-9)
    turned = np.linalg.eigvalsh(M.swapaxes(-1, -2) @ stored @ M)[..., ::-1]
    np.testing.assert_allclose(turned, spread, atol=2e-3 * spread.max())
    assert (error(M) < 0.8 * error(rotations.oscar(reading))).all()


def test_balanced_of_equal_moments_are_their_eigenvectors():
    second = _second()
    np.testing.assert_allclose(
        rotations.balanced(second, second, 1e-3)[0], rotations.eigen(second).vectors, atol=1e-6
    )


def test_oscar_without_factors_leaves_the_others():
    second = _second()
    U = rotations.eigen(second).vectors
    H = scipy.linalg.hadamard(32) / np.sqrt(32)
    order = [_bit_reversed(i, 5) for i in range(32)]
    every = set(rotations.FACTORS)
    for kept, wanted in (
        ((), np.broadcast_to(np.eye(32), U.shape)),
        (("eigenvectors",), U),
        (("hadamard",), np.broadcast_to(H, U.shape)),
        (("eigenvectors", "bit-reversal"), U[..., order]),
        (("eigenvectors", "hadamard"), U @ H),
    ):
        found = rotations.oscar(second, without=every - set(kept))
        np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_eigenvectors_are_sorted_and_their_signs_canonical():
    values, vectors = rotations.eigen(_second())
    assert (np.diff(values, axis=-1) <= 0).all()
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(-2)[..., None, :], axis=-2)
    assert (largest > 0).all()


@pytest.mark.parametrize("order", [8, 32])
def test_hessian_is_damped_and_the_same_for_all_heads(order):
    queries = _second()
    R = rotations.hessian(queries, order)
    for layer in range(2):
        M = sum(queries[layer, head] for head in range(3)) / 3
        M = M + 0.01 * np.trace(M) / 32 * np.eye(32)
        U = np.linalg.svd(M)[0]
        U = U * np.sign(U[np.abs(U).argmax(0), np.arange(32)])
        blocks = scipy.linalg.block_diag(*[scipy.linalg.hadamard(order)] * (32 // order))
        for head in range(3):
            np.testing.assert_allclose(R[layer, head], U @ blocks / np.sqrt(order), atol=1e-9)


def test_shared_is_the_mean_of_the_heads():
    second = _second()
    found = rotations.shared(second)
    for head in range(3):
        np.testing.assert_allclose(found[:, head], sum(second[:, k] for k in range(3)) / 3)
