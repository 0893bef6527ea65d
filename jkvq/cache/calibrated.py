"""What a calibrated cache knows of its model, and which method finds it."""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from jkvq.cache.specs.spec import CacheSpec


@dataclass(frozen=True)
class Transform:
    """What is done to tokens before they are coded; each part is there if its method needs it."""

    mean: Float[np.ndarray, "L K H"] | None = None  # of keys, as if a page's middle stood at 0
    rotation: Float[np.ndarray, "L K H H"] | None = None
    spread: Float[np.ndarray, "L K H"] | None = None  # variance along a balanced rotation, falling


@dataclass(frozen=True)
class SideCalibration:
    """What calibration found for one side, keys or values.

    all_tokens: for a cache that packs every token.
    past_windows: for the tokens that a cache packs when they leave its windows; parts that
        are None are as in ``all_tokens``.
    clip, centroids, widths: each is there if its method needs it.
    """

    all_tokens: Transform = Transform()
    past_windows: Transform = Transform()
    clip: Float[np.ndarray, " L"] | None = None
    centroids: Float[np.ndarray, "L C K H"] | None = None  # of keys or values as they are
    widths: Int[np.ndarray, "8 L K H/2"] | None = None  # of rotary blocks, for 1 to 8 bits each

    def transform(self, spec: CacheSpec) -> Transform:
        """What is done to the tokens that a spec packs."""
        if not spec.windowed:
            return self.all_tokens
        own = {part: x for part, x in vars(self.past_windows).items() if x is not None}
        return replace(self.all_tokens, **own)


@dataclass(frozen=True)
class Calibration:
    """What calibration found for a model.

    method: that made the rotations; None fits any cache.
    weights: the fingerprint of the model's weights; None fits any model of the right shape.
    """

    key: SideCalibration = SideCalibration()
    value: SideCalibration = SideCalibration()
    method: str | None = None
    weights: str | None = None


def methods_for(spec: CacheSpec) -> tuple[str, ...]:
    """The methods whose calibration serves a spec, the one made for it first.

    There are none if it needs none. "kmeans" is followed by its number of centroids.
    """
    if spec.methods:
        return spec.methods
    center = any(side.center for side in spec.sides)
    return ("center", "jkvq", "oscar", "hessian", "blockgtq") if center else ()


def calibrate_command(spec: CacheSpec, model: str = "MODEL") -> str:
    """The command line that makes the calibration that a spec needs."""
    method = methods_for(spec)[0]
    if method.startswith("kmeans"):
        method = f"kmeans --centroids {method.removeprefix('kmeans')}"
    return f"jkvq calibrate --model {model} --method {method}"
