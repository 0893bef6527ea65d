"""`jkvq eval niah`: needles in a haystack."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from jkvq.cli.evaluate.shared import (
    Caches,
    Calibrations,
    Plot,
    calibrated,
    choose_calibrations,
    whole_numbers,
)
from jkvq.cli.shared import (
    AsJson,
    Dtype,
    Implementation,
    Model,
    print_json,
    print_table,
    require_positive,
)
from jkvq.defaults import DEFAULT_MODEL, PLAIN_CACHE

if TYPE_CHECKING:
    from jkvq.evaluation.needles import Cell

_TASKS = "single,distract,multi,multi-key,multi-value,multi-query"


def eval_niah(
    haystack: Annotated[Path, typer.Option(help="A text file, or a folder of .txt files.")],
    model: Model = DEFAULT_MODEL,
    cache: Caches = PLAIN_CACHE,
    task: Annotated[str, typer.Option(help="One or more, with commas between.")] = _TASKS,
    length: Annotated[str, typer.Option(help="Tokens of a prompt; one or more.")] = "512,1024",
    depth: Annotated[str, typer.Option(help="Where the needle lies, in percent.")] = "0,50,100",
    trials: Annotated[int, typer.Option(help="Haystacks for each length and depth.")] = 3,
    calibration: Calibrations = [],  # noqa: B006 (typer copies it)
    plot: Plot = None,
    dtype: Dtype = None,
    implementation: Implementation = None,
    as_json: AsJson = False,
):
    """Needles in a haystack: how many facts of a long prompt the model still finds."""
    from jkvq.attention.implementation import require_known
    from jkvq.cache.specs.spec_text import parse_spec, split_names
    from jkvq.evaluation.needles import niah, read_haystack
    from jkvq.evaluation.plots import needle_figure
    from jkvq.llm import with_cache
    from jkvq.models.model import load_model
    from jkvq.support.pictures import check_picture, save_picture

    names, tasks, text = split_names(cache), task.split(","), read_haystack(haystack)
    lengths, depths = (
        whole_numbers("length", length),
        [d / 100 for d in whole_numbers("depth", depth)],
    )
    require_positive(trials=trials)
    require_known(implementation)
    check_picture(plot)
    for name in names:
        parse_spec(name)  # refuses baselines, which are for the other commands
    folders = choose_calibrations(calibration, names)
    plain = load_model(model, dtype=dtype)
    llms = {
        name: with_cache(
            plain, name, calibrated(plain, name, folder), implementation=implementation
        )
        for name, folder in folders.items()
    }
    found = niah(llms, text, tasks=tasks, lengths=lengths, depths=depths, trials=trials)
    title = f"{model}, {trials} haystack(s) for each length and depth"
    if plot is not None:
        grids = _grids(found, tasks, lengths, depths)
        save_picture(needle_figure(grids, lengths, depths, title), plot)
    if as_json:
        cells = {name: [dataclasses.asdict(cell) for cell in each] for name, each in found.items()}
        print_json({"model": model, "trials": trials, "cells": cells})
        return
    title += f"; lengths {length}, depths {depth} %"
    print_table(title, ("cache", *tasks, "mean"), _rows(found, tasks))


def _rows(found: "Mapping[str, list[Cell]]", tasks: Sequence[str]):
    """Mean scores of each cache: of every task, and of them all."""
    for name, cells in found.items():
        means = [fmean(cell.score for cell in cells if cell.task == task) for task in tasks]
        yield name, *(f"{mean:.0%}" for mean in [*means, fmean(means)])


def _grids(found: "Mapping[str, list[Cell]]", tasks, lengths, depths):
    """Scores as [depth][length] for each cache and task."""

    def grid(cells: "list[Cell]", task: str):
        scores = {(c.depth, c.length): c.score for c in cells if c.task == task}
        return [[scores[depth, length] for length in lengths] for depth in depths]

    return {name: {task: grid(cells, task) for task in tasks} for name, cells in found.items()}
