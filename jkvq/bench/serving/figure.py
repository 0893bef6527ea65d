"""Pictures of how a server does under load."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jkvq.bench.serving.measure import Measured
from jkvq.support.pictures import MARKERS, line_look, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Value = Callable[[Measured], float]


def serving_figure(found: Sequence[Measured], title: str) -> "Figure":
    """A row for each scenario: throughput and waiting by load, and each against the other.

    Where prompts share several parts a last panel has the waiting by that.
    """
    scenarios = list(dict.fromkeys(each.load.scenario for each in found))
    shares = {each.load.prefix for each in found}
    columns = 3 + (len(shares) > 1)
    figure = new_figure(4.6 * columns, 0.9 + 3.6 * len(scenarios), title)
    grid = figure.subplots(len(scenarios), columns, squeeze=False)
    for scenario, panels in zip(scenarios, grid, strict=True):
        _draw_row(panels, [each for each in found if each.load.scenario == scenario])
    labels = [
        server + (f", {share:.0%} shared" if len(shares) > 1 else "")
        for server, share in _lines(found, _prefix)
    ]
    figure.legend(grid[0][0].lines, labels, loc="outside lower center", ncols=4, fontsize="small")
    return figure


def _draw_row(panels: "Sequence[Axes]", found: Sequence[Measured]) -> None:
    """The panels of one scenario."""
    scenario, loop = found[0].load.scenario, found[0].load.loop
    by = "requests at once" if loop == "closed" else "requests per second"
    rate, first = "tokens per second of the system", "mean seconds to the first token"
    lines = _lines(found, _prefix)
    _draw(panels[0], lines, _level, _system, (by, rate), f"{scenario}: higher is better")
    _draw(panels[1], lines, _level, _first, (by, first), "lower is better")
    names = (first, "tokens per second of a request")
    _draw(panels[2], lines, _first, _request, names, f"numbers: {by}; up and left is better")
    for each in found:
        if each.request_rate is not None:
            at, aside = (_first(each), each.request_rate), (4, 4)
            panels[2].annotate(
                f"{each.load.level:g}", at, aside, textcoords="offset points", fontsize="small"
            )
    levels = sorted({each.load.level for each in found})
    for panel in panels[:2]:
        panel.set_xticks(levels, [f"{level:g}" for level in levels])
    if len(panels) > 3:
        by_level = _lines(found, _level)
        shared = "share of the prompts that is common"
        _draw(panels[3], by_level, _prefix, _first, (shared, first), "lower is better")
        panels[3].legend([f"{server}, {level:g}" for server, level in by_level], fontsize="small")


def _lines(found: Sequence[Measured], value: _Value) -> dict[tuple[str, float], list[Measured]]:
    """What belongs together: of one server, with one value."""
    lines: dict[tuple[str, float], list[Measured]] = {}
    for each in found:
        lines.setdefault((each.server, value(each)), []).append(each)
    return lines


def _draw(
    axes: "Axes",
    lines: dict[tuple[str, float], list[Measured]],
    x: _Value,
    y: _Value,
    names: tuple[str, str],
    title: str,
) -> None:
    for index, rows in enumerate(lines.values()):
        look = line_look(index)
        axes.plot(
            [x(each) for each in rows],
            [y(each) for each in rows],
            marker=MARKERS[index % len(MARKERS)],
            color=look["color"],
            linestyle=look["linestyle"],
        )
    axes.set_xlabel(names[0])
    axes.set_ylabel(names[1])
    axes.set_title(title, fontsize="small")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _level(each: Measured) -> float:
    return each.load.level


def _prefix(each: Measured) -> float:
    return each.load.prefix


def _system(each: Measured) -> float:
    return each.system_rate


def _first(each: Measured) -> float:
    return each.ttft.mean


def _request(each: Measured) -> float:
    return float("nan") if each.request_rate is None else each.request_rate
