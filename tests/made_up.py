"""A calibration that no text was read for, of the right kind all the same."""

from collections.abc import Callable

import numpy as np

from jkvq.cache.calibrated import Calibration, SideCalibration, Transform
from jkvq.cache.shape import CacheShape

SHAPE = CacheShape(2, 2, 128)


def random_calibration(
    shape: CacheShape = SHAPE, centroids: int = 16, bits: int = 3
) -> Calibration:
    """Rotations are orthogonal, but for those past windows, which stretch directions by 1/2 to 2.

    Means are far from zero, and widths keep the budget of ``bits``.
    """
    rng = np.random.default_rng(0)
    L, K, H, *_ = shape
    widths = np.array([bits + 1, bits + 1, bits, bits, bits, bits, bits - 1, bits - 1])

    def orthogonal() -> np.ndarray:
        return np.linalg.qr(rng.normal(size=(L, K, H, H)))[0]

    def transform(rotation: Callable[[], np.ndarray]) -> Transform:
        return Transform(
            mean=rng.normal(0, 3, (L, K, H)).astype(np.float32),
            rotation=rotation().astype(np.float32),
            spread=np.sort(rng.random((L, K, H)) + 0.1)[..., ::-1].astype(np.float32),
        )

    def side() -> SideCalibration:
        blocks = np.resize(widths, H // 2)
        return SideCalibration(
            all_tokens=transform(orthogonal),
            past_windows=transform(lambda: orthogonal() * np.geomspace(0.5, 2, H) @ orthogonal()),
            centroids=rng.normal(0, 1, (L, centroids, K, H)).astype(np.float32),
            widths=np.stack([[[rng.permutation(blocks) for _ in range(K)] for _ in range(L)]] * 8),
        )

    return Calibration(side(), side())
