"""What the evaluation draws. Figures are returned; `save_picture` writes them."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jkvq.evaluation.compared import method_of, windows_of, written_windows
from jkvq.evaluation.fidelity import Fidelity
from jkvq.evaluation.perplexity import Score
from jkvq.support.pictures import MARKERS, SEQUENTIAL, line_look, new_figure

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


def kl_figure(results: Mapping[int, Mapping[str, Score]], title: str) -> "Figure":
    """A panel for each length: KL over the bits that are stored at that length.

    A method has a colour; its windows have a mark, and a line joins them. A dotted line leads along
    those that no other has less KL than with as few bits.
    """
    compared = {
        length: {cache: (s.bits_per_element, s.kl) for cache, s in scores.items() if s.kl}
        for length, scores in results.items()
    }
    caches = list(dict.fromkeys(cache for scores in compared.values() for cache in scores))
    methods = list(dict.fromkeys(map(method_of, caches)))
    windows = sorted({windows_of(cache) for cache in caches})
    figure = new_figure(
        max(7, 4.6 * len(compared)),
        5.2,
        f"{title}\nKL of the next token from the 16-bit cache: lower is better",
    )
    panels = figure.subplots(1, len(compared), sharey=True, squeeze=False)[0]
    for axes, (length, points) in zip(panels, compared.items(), strict=True):
        for index, method in enumerate(methods):
            own = {cache: point for cache, point in points.items() if method_of(cache) == method}
            axes.plot(*zip(*sorted(own.values()), strict=True), alpha=0.5, **line_look(index))
            for cache, point in own.items():
                mark = MARKERS[windows.index(windows_of(cache)) % len(MARKERS)]
                axes.plot(*point, mark, color=line_look(index)["color"])
        front = np.asarray(best_for_their_bits(points.values())).reshape(-1, 2)
        axes.plot(*front.T, "k:", drawstyle="steps-post", linewidth=1)
        axes.set_yscale("log")
        axes.set_title(f"first {length:,} tokens", fontsize="medium")
        axes.set_xlabel("bits per element, windows among them")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("KL (nats)")
    for index, method in enumerate(methods):
        panels[0].plot([], [], label=method, **line_look(index))
    panels[0].plot([], [], "k:", linewidth=1, label="least KL for its bits")
    for index, pair in enumerate(windows):
        mark = MARKERS[index % len(MARKERS)]
        panels[0].plot([], [], mark, color="gray", label=f"windows: {written_windows(pair)}")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def best_for_their_bits(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of pairs of bits and KL those that have less KL than all with as few bits (Pareto's)."""
    best: list[tuple[float, float]] = []
    for bits, kl in sorted(points):
        if not best or kl < best[-1][1]:
            best.append((bits, kl))
    return best
