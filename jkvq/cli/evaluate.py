"""`jkvq eval`: the commands that measure."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from jkvq.cache.spec_text import parse_spec, split_names
from jkvq.cli.shared import AsJson, Dtype, Model, print_json, print_table
from jkvq.evaluation.baselines import BASELINES
from jkvq.evaluation.fidelity import Fidelity, fidelity
from jkvq.evaluation.needles import TASKS, Cell, niah, read_haystack
from jkvq.evaluation.perplexity import (
    choose_calibration,
    compare,
    first_tokens,
    read_text,
    reconstruction,
    subject,
)
from jkvq.evaluation.plots import check_plot, draw_fidelity, draw_grid
from jkvq.llm import DEFAULT_MODEL, PLAIN_CACHE, load_plain, with_cache
from jkvq.support.errors import UserError

evaluation = typer.Typer(help="Measure a model through its cache.", no_args_is_help=True)

Text = Annotated[Path, typer.Option(help="A text file; .gz is read as it is.")]
Caches = Annotated[str, typer.Option("--cache", help="One or more, with commas between.")]
Calibrations = Annotated[
    list[Path],
    typer.Option(
        help="A folder that `jkvq calibrate` wrote, for the caches it serves; may be repeated.",
        show_default="those kept for the model",
    ),
]
Plot = Annotated[Path | None, typer.Option(help="Draw it too, as PNG.", show_default=False)]
Tokens = Annotated[int, typer.Option(help="How many, from the text's beginning.")]


@evaluation.command("ppl")
def eval_ppl(
    text: Text,
    model: Model = DEFAULT_MODEL,
    cache: Caches = PLAIN_CACHE,
    tokens: Tokens = 1024,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of a window.", show_default="all tokens in one window"),
    ] = None,
    calibration: Calibrations = [],  # noqa: B006 (typer copies it)
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens from a window to the next.", show_default="the context"),
    ] = None,
    position: Annotated[
        int, typer.Option(help="Where a window's first token stands in the model's context.")
    ] = 0,
    dtype: Dtype = None,
    as_json: AsJson = False,
):
    """Perplexity of a text's first tokens, and KL of the next token against the 16-bit cache.

    Beside the caches of `jkvq methods` it takes the baselines kivi-int2, kivi-int4, kitty-int2 and
    kitty25-int2. The 16-bit cache is always run.
    """
    names, content = split_names(cache), read_text(text)
    names = names if PLAIN_CACHE in names else [PLAIN_CACHE, *names]
    folders = {name: choose_calibration(calibration, name) for name in names}
    llm = load_plain(model, dtype=dtype)
    chosen = first_tokens(llm, content, tokens)
    subjects = {name: subject(llm, name, folder) for name, folder in folders.items()}
    asked = {"context": context, "stride": stride, "position": position}
    results = compare(subjects, chosen, reference=PLAIN_CACHE, **asked)
    if as_json:
        found = {name: dataclasses.asdict(result) for name, result in results.items()}
        described = {"model": model, "tokens": tokens, **asked, "reference": PLAIN_CACHE}
        print_json({**described, "results": found})
        return
    rows = (
        (name, f"{r.bits_per_element:.3f}", f"{r.ppl:,.3f}", f"{r.nll:.4f}", f"{r.kl:.4f}")
        for name, r in results.items()
    )
    title = f"{model}, first {tokens:,} tokens of {text.name}"
    if context is not None:
        title += f", windows of {context:,} every {stride or context:,}"
    if position:
        title += f", from position {position:,}"
    print_table(title, ("cache", "bits", "perplexity", "nats per token", "KL"), rows)


@evaluation.command("fidelity")
def eval_fidelity(
    text: Text,
    model: Model = DEFAULT_MODEL,
    cache: Caches = "int4,saw-int4",
    tokens: Tokens = 1024,
    calibration: Calibrations = [],  # noqa: B006 (typer copies it)
    plot: Plot = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Print every layer, not only the mean.")
    ] = False,
    dtype: Dtype = None,
    as_json: AsJson = False,
):
    """What caches do to keys, values, scores, outputs and hidden states, layer by layer.

    Takes the baselines kivi-int2, kivi-int4, kitty-int2 and kitty25-int2 too.
    """
    names, content = split_names(cache), read_text(text)
    check_plot(plot)
    folders = {name: choose_calibration(calibration, name) for name in names}
    llm = load_plain(model, dtype=dtype)
    chosen = first_tokens(llm, content, tokens)
    caches = {name: reconstruction(llm, name, folder) for name, folder in folders.items()}
    found = fidelity(llm, chosen, caches)
    title = f"{model}, first {tokens:,} tokens of {text.name}"
    if plot is not None:
        draw_fidelity(found, title, plot)
    measures = [field.name for field in dataclasses.fields(Fidelity)]
    if as_json:
        listed = {
            name: [dataclasses.asdict(layer) for layer in each] for name, each in found.items()
        }
        print_json({"model": model, "tokens": tokens, "layers": listed})
        return
    if layers:
        for name, each in found.items():
            rows = (
                (str(i), *(f"{x:.3g}" for x in vars(layer).values()))
                for i, layer in enumerate(each)
            )
            print_table(f"{title}: {name}", ("layer", *measures), rows)
    means = {
        measure: [fmean(getattr(layer, measure) for layer in each) for each in found.values()]
        for measure in measures
    }
    rows = ((measure, *(f"{x:.3g}" for x in means[measure])) for measure in measures)
    print_table(f"{title}: mean over layers", ("", *found), rows)


@evaluation.command("niah")
def eval_niah(
    haystack: Annotated[Path, typer.Option(help="A text file, or a folder of .txt files.")],
    model: Model = DEFAULT_MODEL,
    cache: Caches = PLAIN_CACHE,
    task: Annotated[
        str, typer.Option(help=f"One or more of {', '.join(TASKS)}, with commas between.")
    ] = ",".join(TASKS),
    length: Annotated[str, typer.Option(help="Tokens of a prompt; one or more.")] = "512,1024",
    depth: Annotated[str, typer.Option(help="Where the needle lies, in percent.")] = "0,50,100",
    trials: Annotated[int, typer.Option(help="Haystacks for each length and depth.")] = 3,
    calibration: Calibrations = [],  # noqa: B006 (typer copies it)
    plot: Plot = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
):
    """Needles in a haystack: how many facts of a long prompt the model still finds."""
    names, tasks, text = split_names(cache), task.split(","), read_haystack(haystack)
    lengths, depths = _numbers("length", length), [d / 100 for d in _numbers("depth", depth)]
    check_plot(plot)
    if baselines := BASELINES.keys() & names:
        parse_spec(min(baselines))  # says that these are for the other commands
    folders = {name: choose_calibration(calibration, name) for name in names}
    llm = load_plain(model, dtype=dtype)
    llms = {name: with_cache(llm, name, folder) for name, folder in folders.items()}
    found = niah(llms, text, tasks=tasks, lengths=lengths, depths=depths, trials=trials)
    title = f"{model}, {trials} haystack(s) for each length and depth"
    if plot is not None:
        draw_grid(_grids(found, tasks, lengths, depths), lengths, depths, title, plot)
    if as_json:
        cells = {name: [dataclasses.asdict(cell) for cell in each] for name, each in found.items()}
        print_json({"model": model, "trials": trials, "cells": cells})
        return
    rows = []
    for name, each in found.items():
        means = [fmean(cell.score for cell in each if cell.task == task) for task in tasks]
        rows.append((name, *(f"{mean:.0%}" for mean in [*means, fmean(means)])))
    title += f"; lengths {length}, depths {depth} %"
    print_table(title, ("cache", *tasks, "mean"), rows)


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{name}={text}: whole numbers with commas between") from None


def _grids(found: Mapping[str, list[Cell]], tasks, lengths, depths):
    """Scores as [depth][length] for each cache and task."""

    def grid(cells: list[Cell], task: str):
        scores = {(c.depth, c.length): c.score for c in cells if c.task == task}
        return [[scores[depth, length] for length in lengths] for depth in depths]

    return {name: {task: grid(cells, task) for task in tasks} for name, cells in found.items()}
