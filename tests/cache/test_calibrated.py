import numpy as np

from jkvq.cache.calibrated import SideCalibration, Transform
from jkvq.cache.specs.spec_text import parse_spec

MEAN, OTHER, ROTATION = np.zeros((1, 1, 4)), np.ones((1, 1, 4)), np.eye(4)[None, None]


def test_a_windowed_cache_has_the_transform_past_windows_and_the_rest_of_all_tokens():
    side = SideCalibration(Transform(MEAN, ROTATION), past_windows=Transform(OTHER))
    every, past = (side.transform(parse_spec(cache)) for cache in ("int4", "int4,recent=64"))
    assert (every.mean is MEAN, every.rotation is ROTATION, every.spread) == (True, True, None)
    assert (past.mean is OTHER, past.rotation is ROTATION, past.spread) == (True, True, None)
