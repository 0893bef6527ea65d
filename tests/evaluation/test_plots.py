"""What the pictures say: values where they belong, names, units and what is good."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkvq.evaluation.fidelity import Fidelity
from jkvq.evaluation.perplexity import Score
from jkvq.evaluation.plots import (
    best_for_their_bits,
    fidelity_figure,
    kl_figure,
    needle_figure,
)

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


def _score(bits: float, kl: float) -> Score:
    return Score(ppl=10.0, nll=2.3, kl=kl, scored=100, bits_per_element=bits)


@given(
    st.lists(st.tuples(st.floats(1, 16), st.floats(1e-6, 10)), min_size=1, max_size=12, unique=True)
)
def test_the_best_for_their_bits_are_those_that_nothing_is_better_than(points):
    def beaten(own):
        return any(other != own and other[0] <= own[0] and other[1] <= own[1] for other in points)

    assert best_for_their_bits(points) == sorted(own for own in points if not beaten(own))


def test_kl_is_drawn_over_bits_a_mark_for_windows_and_a_line_along_the_best():
    found = {
        "bf16": _score(16, 0.0),
        "int4": _score(4.5, 0.1),
        "int4,sink=64,recent=64": _score(4.8, 0.01),
        "oscar-int2,sink=0,recent=0": _score(2.5, 1.3),
        "kivi-int2": _score(4.6, 0.3),
    }
    figure = kl_figure({2048: found}, "the model")
    (axes,) = figure.axes
    dotted = [np.asarray(line.get_xydata()) for line in axes.lines if line.get_linestyle() == ":"]
    (front,) = (points for points in dotted if points.size)  # another is for the legend
    assert front.tolist() == [[2.5, 1.3], [4.5, 0.1], [4.8, 0.01]]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [
        *("int4", "oscar-int2", "kivi-int2", "least KL for its bits"),
        *("windows: none", "windows: 64 + 64"),
    ]
