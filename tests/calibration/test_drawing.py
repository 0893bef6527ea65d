"""What the picture of a calibration says."""

import dataclasses

import numpy as np
import pytest

from jkvq.cache.calibrated import Calibration, SideCalibration, Transform
from jkvq.calibration.artefact import Artefact, Manifest
from jkvq.calibration.drawing import draw
from jkvq.calibration.solve import Spectra

L, K, H = 24, 2, 8
MANIFEST = Manifest(
    *("tiny", "abc", L, K, H, "jkvq", {}, {}, "fox.txt", "abc", 2000, {}),
)
EMPTY = Artefact(Calibration(), MANIFEST, Spectra(), Spectra())


def _spectra(energy_after: np.ndarray) -> Spectra:
    before = np.ones((L, K, H))
    before[..., 3] = 9  # mean 2
    return Spectra(np.tile(2.0 ** -np.arange(H), (L, K, 1)), before, energy_after)


def test_spectra_and_energies_say_what_is_good():
    uneven = np.ones((L, K, H))
    uneven[0, 0, 0] = 1.5
    artefact = dataclasses.replace(
        EMPTY, key=_spectra(np.full((L, K, H), 7.0)), value=_spectra(uneven)
    )
    figure = draw(artefact)
    assert figure.get_suptitle() == "Calibration of tiny: method jkvq, 2,000 tokens of fox.txt"
    panels, bars = figure.axes[:6], figure.axes[6:]
    _, before, after = panels[:3]
    assert "keys before rotation: strongest channel 4.5 x the mean" in before.get_title()
    assert "keys after rotation: strongest channel 1.0 x the mean" in after.get_title()
    assert "lower is better" in after.get_title()
    assert before.images[0].get_clim() == after.images[0].get_clim()
    assert [text.get_text() for text in after.texts] == ["flat: all channels have the same energy"]
    assert not panels[5].texts  # the values' energies are not flat
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in panels)
    assert [bar.get_ylabel() for bar in bars[:2]] == [
        "layer",
        "energy of the channel / mean of its head",
    ]


def test_heads_are_marked_by_layer():
    artefact = dataclasses.replace(EMPTY, key=_spectra(np.ones((L, K, H))))
    axes = draw(artefact).axes[1]
    assert axes.get_ylabel() == f"layer ({K} KV heads each)"
    marks = {int(label.get_text()): label.get_position()[1] for label in axes.get_yticklabels()}
    assert 5 <= len(marks) <= 10
    for layer, place in marks.items():
        assert place == layer * K - 0.5  # above the layer's first head


@pytest.mark.parametrize("most", [3.0, 0.0])
def test_means_and_widths_have_units(most):
    mean = np.zeros((L, K, H))
    mean[0, 0, 0] = -most
    side = SideCalibration(Transform(mean=mean))
    keys, values = draw(dataclasses.replace(EMPTY, calibration=Calibration(side, side))).axes[:2]
    low, high = keys.images[0].get_clim()
    assert low == -high
    assert high >= most
    assert values.get_title().startswith("values: mean")

    side = SideCalibration(widths=np.full((8, L, K, H // 2), 4))
    figure = draw(dataclasses.replace(EMPTY, calibration=Calibration(key=side)))
    assert [axes.get_ylabel() for axes in figure.axes[2:]] == ["bits per channel"] * 2
    assert figure.axes[0].images[0].get_clim() == (0.5, 8.5)
