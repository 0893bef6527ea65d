"""What the evaluation draws. Figures are returned; `save_picture` writes them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jkvq.evaluation.fidelity import Fidelity
from jkvq.support.pictures import SEQUENTIAL, line_look, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class _Measure(NamedTuple):
    """What a panel says of a measure of `Fidelity`."""

    title: str
    unit: str


_RELATIVE = "squared error / squared norm"
_MEASURES = {
    "key": _Measure("keys as coded", _RELATIVE),
    "value": _Measure("values as coded", _RELATIVE),
    "score": _Measure("attention scores", "mean |q·k - q·k̂|, before scaling"),
    "rope_score": _Measure("scores at other distances", "mean |q·Rk - q·Rk̂|, before scaling"),
    "attention_kl": _Measure("attention weights", "KL divergence (nats)"),
    "top10": _Measure("ten most attended tokens", "part that stays among them"),
    "mixed": _Measure("attention output, before W_o", _RELATIVE),
    "output": _Measure("attention output, after W_o", _RELATIVE),
    "hidden": _Measure("hidden state after the layer", _RELATIVE),
}
_HIGHER_IS_BETTER = ("top10",)


def fidelity_figure(found: Mapping[str, Sequence[Fidelity]], title: str) -> "Figure":
    """A panel for each measure, over the layers, with a line for each cache."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 (takes a second)

    figure = new_figure(15, 10, f"{title}\nWhat each cache does to attention, layer by layer")
    panels = figure.subplots(3, 3, sharex=True).flat
    names = [field.name for field in dataclasses.fields(Fidelity)]
    for axes, name in zip(panels, names, strict=True):
        measure, higher = _MEASURES[name], name in _HIGHER_IS_BETTER
        for index, (cache, layers) in enumerate(found.items()):
            errors = [getattr(layer, name) for layer in layers]
            width = 3 - 2 * index / len(found)  # one that lies under another shows at its sides
            axes.plot(errors, label=cache, marker=".", linewidth=width, **line_look(index))
        better = "higher" if higher else "lower"
        axes.set_title(f"{name}: {measure.title}\n({better} is better)", fontsize="medium")
        axes.set_ylabel(measure.unit)
        axes.grid(alpha=0.3)
        drawn = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
        if higher:
            axes.set_ylim(min(0.9, float(drawn.min()) - 0.02), 1.005)
        else:
            _show_errors(axes, drawn)
    for axes in figure.axes[-3:]:
        axes.set_xlabel("layer (0 is the first)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _show_errors(axes: "Axes", drawn: np.ndarray) -> None:
    """A logarithmic axis of a decade at least, so that equal errors are not drawn as noise."""
    positive = drawn[drawn > 0]
    if not positive.size:
        axes.set_ylim(-0.05, 1)
        axes.text(0.5, 0.5, "no error", ha="center", transform=axes.transAxes)
        return
    axes.set_yscale("log", nonpositive="clip")
    low, high = positive.min() / 1.3, positive.max() * 1.3
    widen = max(1.0, (10 * low / high) ** 0.5)
    axes.set_ylim(low / widen, high * widen)


def needle_figure(
    cells: Mapping[str, Mapping[str, Sequence[Sequence[float]]]],
    lengths: Sequence[int],
    depths: Sequence[float],
    title: str,
) -> "Figure":
    """Heat maps of scores from 0 to 1: cells[row][column] is [depth][length]."""
    columns = list(next(iter(cells.values())))
    width, height = 0.7 * len(lengths) + 1, 0.45 * len(depths) + 0.7
    figure = new_figure(
        max(7, width * len(columns) + 2),
        height * len(cells) + 1.6,
        f"{title}\nNumbers found in the haystack, in percent: higher is better",
    )
    grid = figure.subplots(len(cells), len(columns), squeeze=False, sharex=True, sharey=True)
    for row, (name, panels) in zip(grid, cells.items(), strict=True):
        for axes, column in zip(row, columns, strict=True):
            scores = np.asarray(panels[column])
            axes.imshow(scores, aspect="auto", vmin=0, vmax=1, cmap=SEQUENTIAL)
            for (y, x), score in np.ndenumerate(scores):
                ink = "black" if score > 0.6 else "white"
                axes.text(x, y, f"{100 * score:.0f}", color=ink, ha="center", va="center")
            axes.set_title(f"{name}: {column}", fontsize="medium")
            axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
            axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    figure.supxlabel("length of the prompt (tokens)")
    figure.supylabel("where the needle is (0%: at the start)")
    bar = figure.colorbar(grid[0][0].images[0], ax=grid, label="found (%)")
    bar.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0", "25", "50", "75", "100"])
    return figure
