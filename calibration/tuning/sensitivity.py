"""What each layer's codes cost: the KL of the next tokens with that layer coded alone.

That is measured of the narrowest codes of each kind. What wider ones take off, and what other
windows do, is measured for all layers at once, of keys and of values.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from jkvq.cache.calibrated import Calibration
from jkvq.cache.specs.spec import CacheSpec
from jkvq.calibration.learning.learn import turned_layers
from jkvq.calibration.learning.parameters import starting_from, unchanged
from jkvq.calibration.learning.passes import Layers, Network, Windows
from jkvq.calibration.tuning.widths import (
    Window,
    by_side,
    narrowest,
    narrowest_alike,
    side_options,
)
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params
from jkvq.support.progress import Bar


def layers_of(calibration: Calibration, spec: CacheSpec, layers: int) -> Layers:
    """What a cache does to tokens before they are coded, layer by layer."""
    start = starting_from(calibration, spec, layers)
    return turned_layers(start, unchanged(start))


def sensitivities(
    config: ModelConfig,
    params: Params,
    calibration: Calibration,
    options: Sequence[CacheSpec],
    read: Sequence[Windows],
    bar: Bar,
) -> Float[np.ndarray, "n L"]:
    """Mean KL over windows with one layer stored as each option says, and the others exact."""
    total = np.zeros((len(options), config.layers))
    networks = [Network(config, params, option) for option in options]
    turned = [layers_of(calibration, option, config.layers) for option in options]
    for windows in read:
        exact = list(networks[0].states(windows, None))
        for number, (network, layers) in enumerate(zip(networks, turned, strict=True)):
            for layer in range(config.layers):
                total[number, layer] += float(network.kl_of_one(layer, layers, windows, exact))
                bar.advance(1)
    return total / len(read)


def losses_of_options(
    config: ModelConfig,
    params: Params,
    calibration: Calibration,
    alone: Mapping[CacheSpec, Float[np.ndarray, " L"]],
    at: Window,
    others: Sequence[Window],
    read: Sequence[Windows],
    bar: Bar,
) -> Mapping[Window, Float[np.ndarray, "n L"]]:
    """Losses of layers for all ``side_options``, behind each window.

    ``alone`` are those of layers coded alone, behind the window ``at``, for the narrowest options
    of each kind.
    """

    def together(spec: CacheSpec) -> float:
        bar.advance(1)
        return measured(config, params, calibration, spec, read)

    options = side_options(at)
    totals = {spec: together(spec) for spec in options}
    found = np.stack(
        [
            totals[spec] / totals[alike] * alone[alike]
            for spec, alike in zip(options, narrowest_alike(options), strict=True)
        ]
    )
    known = np.array([totals[spec] for spec in narrowest(at)])
    losses = {at: found}
    for window in others:
        if window != at:
            ratio = np.array([together(spec) for spec in narrowest(window)]) / known
            losses[window] = by_side(*ratio)[:, None] * found
    return losses


def measured(
    config: ModelConfig,
    params: Params,
    calibration: Calibration,
    spec: CacheSpec,
    read: Sequence[Windows],
) -> float:
    """Mean KL over windows with all layers stored as a cache does."""
    network, layers = Network(config, params, spec), layers_of(calibration, spec, config.layers)
    return float(np.mean([float(network.kl(layers, windows)) for windows in read]))
