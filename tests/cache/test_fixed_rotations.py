import numpy as np
import pytest

from jkvq.cache.fixed_rotations import block_hadamard, fixed_rotation, hadamard, random_rotation


def test_hadamard_of_order_four():
    signs = [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    np.testing.assert_array_equal(hadamard(4), np.array(signs) / 2)


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [("bdr16", 64), ("saw", 64), ("saw", 80), ("saw", 256), ("hadamard", 256), ("random", 80)],
)
def test_rotations_are_orthogonal(name, head_dim):
    R = fixed_rotation(name, head_dim, seed=3)
    assert R is not None
    np.testing.assert_allclose(R @ R.T, np.eye(head_dim), atol=1e-12)


def test_block_hadamard_mixes_within_blocks_only():
    R = block_hadamard(64, 16)
    blocks = np.kron(np.eye(4), np.ones((16, 16)))
    np.testing.assert_array_equal(np.abs(R) > 0, blocks > 0)


@pytest.mark.parametrize(("head_dim", "order"), [(64, 64), (128, 128), (256, 128), (80, 16)])
def test_saw_is_the_largest_order_up_to_128(head_dim, order):
    R = fixed_rotation("saw", head_dim, 0)
    np.testing.assert_array_equal(R, block_hadamard(head_dim, order))


def test_random_rotation_follows_its_seed():
    np.testing.assert_array_equal(random_rotation(8, 1), random_rotation(8, 1))
    assert np.abs(random_rotation(8, 1) - random_rotation(8, 2)).max() > 0.1
