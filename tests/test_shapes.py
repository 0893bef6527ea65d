"""Wrong shapes are found: without that, wrong signatures would stay."""

import numpy as np
import pytest
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float

from jkvq.pallas_kernels.rotary import angles
from tests.shapes import checked


@checked
def _sum(
    x: Float[np.ndarray, "A B"], y: Float[np.ndarray, " B"], turned: bool
) -> Float[np.ndarray, "A B"]:
    return (x + y).T if turned else x + y


def test_functions_of_the_package_are_checked():
    with pytest.raises(BeartypeCallHintViolation):
        angles(np.ones((2, 2), np.float32), np.ones(3, np.int32))  # pyright: ignore


def test_sizes_of_one_name_agree():
    x = np.ones((4, 3), np.float32)
    assert _sum(x, x[0], False).shape == (4, 3)
    with pytest.raises(BeartypeCallHintViolation):
        _sum(x, x[0, :1], False)


def test_what_comes_back_is_checked():
    x = np.ones((4, 3), np.float32)
    with pytest.raises(BeartypeCallHintViolation):
        _sum(x, x[0], True)
