"""The report of a job: tables in Markdown, one picture, and the same figures as JSON."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jkvq.support.atomic import written_whole
from jkvq.support.pictures import MARKERS, line_look, new_figure, save_picture
from jkvq.tasks.results import Column, Result, Results, areas, by_kind
from jkvq.tasks.scores import Score
from jkvq.tasks.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE = "accuracy.png"
_NOTES = """\
Scores are in percent. The interval of an accuracy is Wilson's, that of a difference from
{reference} a bootstrap over problems, both of 95%. Bits are those stored per element at the mean
length of prompt and answer. *Ended* are texts that end by themselves, *same* those equal to
{reference}'s; the others part from it after so many characters in the median. *Failed* are
requests that could not be run: they are part of no figure, and of no difference on either side.
"""


def write_report(
    folder: Path,
    title: str,
    results: Results,
    scores: Mapping[str, Mapping[str, Sequence[Score]]],
    reference: str,
) -> None:
    """Writes report.md, its picture, and results.json."""
    save_picture(accuracy_figure(results, title), folder / PICTURE)
    with written_whole(folder / "report.md") as file:
        file.write(f"# {title}\n\n{_NOTES.format(reference=reference)}\n")
        file.write(f"![Accuracy against bits]({PICTURE})\n\n## All tasks\n\n")
        file.writelines(table(overview(results)))
        for column in results:
            file.write(f"\n## {column.title}\n\n")
            file.writelines(table(_details(results[column])))
        for task in dict.fromkeys(column.task for column in results):
            file.writelines(_kinds(task, {name: each[task] for name, each in scores.items()}))
    with written_whole(folder / "results.json") as file:
        json.dump(listed(results), file, indent=1)


def listed(results: Results) -> list[dict[str, Any]]:
    """The results as JSON has them, where null stands for NaN."""
    return [
        {
            **{"task": column.task, "part": column.part, "cache": cache},
            **{name: None if _is_nan(each) else each for name, each in asdict(result).items()},
        }
        for column, by_cache in results.items()
        for cache, result in by_cache.items()
    ]


def _is_nan(figure: float | Interval | None) -> bool:
    return figure is not None and bool(np.isnan(figure).any())


def table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Rows as Markdown, the first of them the header."""
    for number, row in enumerate(rows):
        yield f"| {' | '.join(row)} |\n"
        if number == 0:
            yield f"|{' --- |' * len(row)}\n"


def overview(results: Results) -> Iterator[list[str]]:
    """A row for each cache: its accuracy on every task, and how far that is from 16 bits."""
    found = {task: areas(results, task) for task in dict.fromkeys(c.task for c in results)}
    by_length = [task for task, each in found.items() if each]
    titles = (column.title for column in results)
    yield ["cache", *titles, *(f"{task}, area" for task in by_length)]
    for cache in next(iter(results.values())):
        cells = [_short(by_cache[cache]) for by_cache in results.values()]
        yield [cache, *cells, *(_figure(100 * found[task][cache], ".1f") for task in by_length)]


def _short(result: Result) -> str:
    mean, apart = _figure(100 * result.accuracy.value, ".1f"), result.difference
    if apart is not None:
        mean += f" ({100 * apart.value:+.1f})"
    failed = f"{result.failed:,} failed" if result.failed else ""
    return ", ".join(filter(None, (mean, failed)))


def _details(by_cache: Mapping[str, Result]) -> Iterator[list[str]]:
    count = next(iter(by_cache.values())).problems
    header = ("cache", "bits", f"accuracy of {count:,}", "difference", "tokens", "ended")
    some_failed = any(result.failed for result in by_cache.values())
    yield [*header, "same", "parts after", *(["failed"] if some_failed else [])]
    for cache, result in by_cache.items():
        compared = ["", "", ""]
        if result.difference is not None and result.same is not None:
            parted = "" if result.parted is None else f"{result.parted:,.0f}"
            compared = [_percent(result.difference, "+.1f"), f"{100 * result.same:.0f}", parted]
        yield [
            *(cache, _figure(result.bits, ".2f"), _percent(result.accuracy, ".1f"), compared[0]),
            *(_figure(result.tokens, ",.0f"), _figure(100 * result.ended, ".0f"), *compared[1:]),
            *([f"{result.failed:,}"] if some_failed else []),
        ]


def _percent(interval: Interval, form: str) -> str:
    """An interval in percent."""
    value, low, high = (_figure(100 * number, form) for number in interval)
    return f"{value} ({low} to {high})" if value else ""


def _figure(value: float, form: str) -> str:
    """A figure; nothing for NaN, where no request could be run."""
    return "" if math.isnan(value) else f"{value:{form}}"


def _kinds(task: str, scores: Mapping[str, Sequence[Score]]) -> Iterator[str]:
    """A table of a task's kinds, for each part, where it has several."""
    means = {cache: by_kind(each) for cache, each in scores.items()}
    keys = list(next(iter(means.values())))
    if len({kind for kind, _ in keys}) < 2:
        return
    yield f"\n## {task} by kind\n\n"
    rows = (
        [
            Column(kind, part).title,
            *(_figure(100 * each[kind, part], ".1f") for each in means.values()),
        ]
        for kind, part in keys
    )
    yield from table([["", *means], *rows])


def accuracy_figure(results: Results, title: str) -> "Figure":
    """A panel for each task: accuracy over the bits that caches store."""
    across = min(3, len(results))
    down = -(-len(results) // across)
    figure = new_figure(5 * across, 3.6 * down, f"{title}\nAccuracy against bits stored")
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for axes, (column, by_cache) in zip(panels, results.items(), strict=False):
        for index, (cache, result) in enumerate(by_cache.items()):
            value, low, high = (100 * number for number in result.accuracy)
            look = {"color": line_look(index)["color"], "fmt": MARKERS[index // 7 % len(MARKERS)]}
            error = [[max(0.0, value - low)], [max(0.0, high - value)]]
            axes.errorbar([result.bits], [value], error, label=cache, capsize=3, **look)
        axes.set_title(column.title)
        axes.set_xlabel("bits per element")
        axes.set_ylabel("accuracy (%)")
        axes.grid(alpha=0.3)
    for axes in panels[len(results) :]:
        axes.remove()
    names, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(names, labels, loc="outside lower center", ncols=4)
    return figure
