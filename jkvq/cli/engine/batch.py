"""`jkvq batch`: a file of requests, and a file of answers."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jkvq.cli.engine.interrupts import on_ctrl_c
from jkvq.cli.shared import (
    Actors,
    CalibrationFolder,
    Check,
    ChosenCache,
    Dtype,
    Implementation,
    Model,
    Ray,
    require_positive,
)
from jkvq.defaults import DEFAULT_MODEL
from jkvq.support.progress import note, spinner

if TYPE_CHECKING:
    from jkvq.jobs.job import Tally


def batch(
    requests: Annotated[
        Path,
        typer.Argument(
            help='A file with a request in each line: {"prompt": "..."} or {"messages": [...]}, '
            "with options, or a line of OpenAI's batches."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(help="Where the answers go, one a line; those that it holds are kept."),
    ],
    model: Model = DEFAULT_MODEL,
    cache: ChosenCache = None,
    calibration: CalibrationFolder = None,
    check: Check = True,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Of requests that do not say.")
    ] = 256,
    seed: Annotated[
        int,
        typer.Option(help="Requests that draw and name none get one made of it and their line."),
    ] = 0,
    memory: Annotated[
        float, typer.Option(help="The part of the free memory that the cache may take.")
    ] = 0.9,
    slots: Annotated[
        int | None,
        typer.Option(help="Requests that run at once.", show_default="8 on a CPU and 64 on a GPU"),
    ] = None,
    ray: Ray = None,
    actors: Actors = None,
    dtype: Dtype = None,
    implementation: Implementation = None,
):
    """Answer a file of requests; the same command goes on where a run was stopped."""
    with spinner("Starting"):
        from jkvq.jobs.batch import Window
        from jkvq.jobs.job import open_job, run_jobs
        from jkvq.jobs.ray_actors import ray_answerer
        from jkvq.loading.load import load

    require_positive(slots=1 if slots is None else slots, actors=1 if actors is None else actors)

    def say_how_to_go_on() -> bool:
        note(f"{out} keeps the answers so far; the same command goes on from them")
        return False  # it ends

    opened = open_job(requests, out, max_new_tokens=max_new_tokens, seed=seed)
    with opened as job, on_ctrl_c(say_how_to_go_on):
        if job.kept:
            note(f"{job.kept:,} of {job.total:,} requests are answered in {out} already")
        if job.kept < job.total:
            made = functools.partial(
                load,
                model,
                cache=cache,
                calibration=calibration,
                dtype=dtype,
                implementation=implementation,
                check=check,
            )
            if ray is None:
                answerer = Window(made(), memory, slots).answers
            else:
                answerer = ray_answerer(made, ray, actors, slots)
            _report(run_jobs([job], answerer, model))
        note(f"{job.total:,} answers in {out}, {job.errors:,} of them errors")
        if job.errors == job.total:
            raise typer.Exit(2)


def _report(tally: "Tally") -> None:
    shared = tally.cached / max(tally.read, 1)
    note(
        f"{tally.written:,} tokens written, {tally.rate:,.1f} tokens/s; {tally.read:,} read, "
        f"{shared:.0%} of them stored for an earlier request"
    )
