import numpy as np
import pytest

from jkvq.cache.footprint import bits_per_element
from jkvq.cache.shape import CacheShape
from jkvq.calibration.tuning.choose import candidates, least_loss
from jkvq.calibration.tuning.widths import Window


@pytest.mark.parametrize(("context", "bits", "recent"), [(2048, 4.0, 64), (32768, 2.5, 448)])
def test_windows_are_widened_where_they_cost_little(context, bits, recent):
    """At 2,048 tokens windows of 64 + 448 take 6 bits by themselves, at 32,768 a quarter of one."""
    # 2, 3, 4 and 8 bits of keys, then of values, of four layers
    losses = np.tile([1, 0.3, 0.08, 1e-3], 2)[:, None] * np.ones(4)
    every = candidates({Window(64, 64, 16): losses, Window(64, 448, 16): 0.4 * losses}, 128)
    shape = CacheShape(layers=4, kv_heads=2, head_dim=128)
    chosen = least_loss(every, lambda spec: bits_per_element(spec, shape, context) <= bits)
    assert chosen is not None
    assert chosen.spec.recent == recent
