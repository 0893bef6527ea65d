"""What the pictures say: values where they belong, names, units and what is good."""

import dataclasses
import re

import numpy as np
import pytest

from jkvq.evaluation.fidelity import Fidelity
from jkvq.evaluation.plots import fidelity_figure, needle_figure

NAMES = [field.name for field in dataclasses.fields(Fidelity)]


def _layers(*errors: float) -> list[Fidelity]:
    """Layers with the same error in all measures; top10 falls with it."""
    return [Fidelity(**(dict.fromkeys(NAMES, x) | {"top10": 1 - x})) for x in errors]


def test_fidelity_draws_every_measure_of_every_cache_with_its_direction():
    found = {"int4": _layers(0.01, 0.02, 0.04), "int2": _layers(0.1, 0.2, 0.4)}
    figure = fidelity_figure(found, "the model")
    assert "the model" in figure.get_suptitle()
    for axes, name in zip(figure.axes, NAMES, strict=True):
        better = "higher" if name == "top10" else "lower"
        assert re.match(rf"{name}: .*\n\({better} is better\)", axes.get_title())
        assert axes.get_ylabel()
        assert axes.get_yscale() == ("linear" if name == "top10" else "log")
        for line, layers in zip(axes.lines, found.values(), strict=True):
            assert np.asarray(line.get_ydata()).tolist() == [
                getattr(layer, name) for layer in layers
            ]
    assert all(axes.get_xlabel().startswith("layer") for axes in figure.axes[-3:])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(found)


def test_the_legend_of_fidelity_covers_no_panel():
    figure = fidelity_figure({"saw-int4,sink=64,recent=64": _layers(0.1, 0.2)}, "a title")
    figure.canvas.draw()
    legend = figure.legends[0].get_window_extent()
    assert not any(legend.overlaps(axes.get_window_extent()) for axes in figure.axes)


@pytest.mark.parametrize("errors", [(0.1, 0.1), (0.1, 0.1000001), (0.05, 0.2)])
def test_errors_that_hardly_differ_look_so(errors):
    """An axis spans a decade at least, with everything on it."""
    low, high = fidelity_figure({"int4": _layers(*errors)}, "a title").axes[0].get_ylim()
    assert high / low == pytest.approx(10)
    assert low < min(errors) <= max(errors) < high


def test_no_error_at_all_is_said():
    axes = fidelity_figure({"f32": _layers(0, 0)}, "a title").axes[0]
    assert [text.get_text() for text in axes.texts] == ["no error"]
    mixed = fidelity_figure({"f32": _layers(0, 0), "int4": _layers(0.1, 0.2)}, "a title").axes[0]
    assert mixed.get_yscale() == "log"


def test_needles_have_a_number_in_each_cell_that_can_be_read():
    scores = {"single": [[0, 1 / 3], [0.6, 1]], "multi": [[1, 1], [1, 1]]}
    figure = needle_figure({"bf16": scores, "int2": scores}, [512, 1024], [0, 1], "a title")
    *panels, bar = figure.axes
    titles = [axes.get_title() for axes in panels]
    assert titles == ["bf16: single", "bf16: multi", "int2: single", "int2: multi"]
    assert [text.get_text() for text in panels[0].texts] == ["0", "33", "60", "100"]
    assert "higher is better" in figure.get_suptitle()
    assert (figure.get_supxlabel(), bar.get_ylabel()) == (
        "length of the prompt (tokens)",
        "found (%)",
    )
    image = panels[0].images[0]
    for text, score in zip(panels[0].texts, np.ravel(scores["single"]), strict=True):
        brightness = np.dot(image.to_rgba(score, norm=True)[:3], [0.299, 0.587, 0.114])
        assert abs(brightness - (text.get_color() == "white")) > 0.4
