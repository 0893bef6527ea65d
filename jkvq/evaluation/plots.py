"""What the evaluation draws, as PNG."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jkvq.evaluation.fidelity import Fidelity
from jkvq.support.errors import UserError


def check_plot(path: Path | None) -> None:
    """Refuses, before any work, a picture that could not be written."""
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise UserError(f"{path}: a picture is written as PNG; name it like fidelity.png")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; make it first")


def draw_fidelity(found: Mapping[str, Sequence[Fidelity]], title: str, path: Path) -> None:
    """A panel for each measure, over the layers, with a line for each cache."""
    names = [field.name for field in dataclasses.fields(Fidelity)]
    figure = _figure(15, 10)
    panels = figure.subplots(3, 3, sharex=True).flat
    for axes, measure in zip(panels, names, strict=True):
        for cache, layers in found.items():
            axes.plot([getattr(layer, measure) for layer in layers], label=cache, linewidth=1)
        axes.set_title(measure)
        drawn = [y for line in axes.lines for y in np.asarray(line.get_ydata())]
        if measure != "top10" and min(drawn) > 0:
            axes.set_yscale("log")
    figure.axes[0].legend(fontsize="small")
    for axes in figure.axes[-3:]:
        axes.set_xlabel("layer")
    _save(figure, title, path)


def draw_grid(
    cells: Mapping[str, Mapping[str, Sequence[Sequence[float]]]],
    lengths: Sequence[int],
    depths: Sequence[float],
    title: str,
    path: Path,
) -> None:
    """Heat maps of scores from 0 to 1: cells[row][column] is [depth][length]."""
    columns = list(next(iter(cells.values())))
    figure = _figure(2.6 * len(columns) + 1, 2.4 * len(cells) + 1)
    grid = figure.subplots(len(cells), len(columns), squeeze=False)
    shading = {"vmin": 0, "vmax": 1, "cmap": "RdYlGn"}
    for row, (name, panels) in zip(grid, cells.items(), strict=True):
        for axes, column in zip(row, columns, strict=True):
            axes.imshow(panels[column], aspect="auto", **shading)
            axes.set_title(f"{name}, {column}", fontsize="small")
            axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
            axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    figure.supxlabel("tokens")
    figure.supylabel("depth")
    figure.colorbar(grid[0][0].images[0], ax=grid, label="score")
    _save(figure, title, path)


def _figure(width: float, height: float):
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (takes a second)
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure, title: str, path: Path) -> None:
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}") from None
