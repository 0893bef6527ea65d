"""`jkvq compare`: calibration, perplexity, attention, tasks, speed and memory of caches."""

import functools
from pathlib import Path
from typing import Annotated

import typer

from jkvq.cli.engine.interrupts import on_ctrl_c
from jkvq.cli.evaluate.shared import (
    Calibrations,
    Text,
    Windows,
    calibrated,
    choose_calibrations,
    whole_numbers,
)
from jkvq.cli.evaluate.tasks import chosen_tasks, how_to_go_on
from jkvq.cli.shared import Dtype, Implementation, Model, print_table, require_positive
from jkvq.defaults import DEFAULT_MODEL, PLAIN_CACHE
from jkvq.support.progress import note, spinner

_LAYERS = 1024  # tokens at most whose attention is looked at layer by layer


def compare(
    text: Text,
    out: Annotated[Path, typer.Option(help="The report's folder; what it holds is kept.")],
    model: Model = DEFAULT_MODEL,
    caches: Annotated[
        str, typer.Option("--caches", "--cache", help="One or more, with commas between.")
    ] = "saw-int4,jkvq-int4,jkvq-int2",
    also: Annotated[
        str | None,
        typer.Option(
            help="Caches and baselines of which perplexity and KL are measured alone, such as "
            "kivi-int2,jkvq-int2,calibration=DIR.",
            show_default="none",
        ),
    ] = None,
    tokens: Annotated[
        str,
        typer.Option(help="How many, from the text's beginning; several with commas between."),
    ] = "2048",
    windows: Windows = None,
    tasks: Annotated[
        str | None, typer.Option(help="As `jkvq eval tasks` has them.", show_default="none")
    ] = None,
    data: Annotated[Path, typer.Option(help="The folder with the tasks' files.")] = Path("data"),
    lengths: Annotated[str, typer.Option(help="Of tasks made at any length.")] = "4096",
    limit: Annotated[
        int | None, typer.Option(help="Problems of each kind and length.", show_default="all")
    ] = None,
    requests: Annotated[int, typer.Option(help="That speed is measured with.")] = 16,
    calibration: Calibrations = [],  # noqa: B006 (typer copies it)
    dtype: Dtype = None,
    implementation: Implementation = None,
):
    """Compare caches in everything: quality, tasks, speed and memory, into one folder.

    Caches that need it are calibrated first; bf16 always runs. The same command goes on where a
    run was stopped, and measures caches that are added.
    """
    with spinner("Starting"):
        from jkvq.attention.implementation import require_known
        from jkvq.bench.engine import Workload, draw_requests
        from jkvq.cache.specs.spec_text import parse_spec, split_names
        from jkvq.cli.compare.report import Findings, rows, write_comparison
        from jkvq.cli.compare.stages import Stages
        from jkvq.evaluation.compared import in_windows, read_windows
        from jkvq.evaluation.corpus import first_tokens, read_text
        from jkvq.jobs.batch import Window
        from jkvq.models.model import load_model
        from jkvq.tasks.job import TaskJob
        from jkvq.tasks.problems import Sampling
        from jkvq.tasks.task import Setting

    numbers, content = tuple(whole_numbers("lengths", lengths)), read_text(text)
    scored = sorted(set(whole_numbers("tokens", tokens)))
    require_positive(tokens=scored[0], requests=requests, lengths=min(numbers))
    require_positive(limit=1 if limit is None else limit)
    require_known(implementation)
    chosen = chosen_tasks(tasks) if tasks else {}
    names = list(dict.fromkeys([PLAIN_CACHE, *split_names(caches)]))
    for name in names:
        parse_spec(name)  # refuses baselines, which are for other commands
    others = split_names(also) if also else []
    every = in_windows([*names, *others], [] if windows is None else read_windows(windows))
    folders = choose_calibrations(calibration, every)
    plain = load_model(model, dtype=dtype)
    known = {name: calibrated(plain, name, folder) for name, folder in folders.items()}
    stages = Stages(out, plain, names, known, implementation)
    read = first_tokens(plain.tokenizer, content, scored[-1])
    workload = Workload(requests=requests)
    job = TaskJob(out / "tasks", chosen, known.get, implementation)
    job.to_begin(plain, names)  # refuses answers made otherwise, before anything is measured
    figures = (  # before tasks, which take longest: these refuse a folder of other settings
        stages.memory(),
        stages.perplexity(read, scored, text.name),
        stages.fidelity(read[:_LAYERS], text.name),
        stages.speed(draw_requests(plain, workload)),
    )
    answered = None
    if chosen:
        setting = Setting(plain.tokenizer, plain.config.context, data, numbers, limit, seed=0)
        greedy = Sampling(1, 0.0, None, seed=0)
        with on_ctrl_c(functools.partial(how_to_go_on, out)):
            answered = job.run(
                plain, setting, greedy, names, lambda c: Window(stages.llm(c)).answers
            )
    found = Findings(*figures, answered)
    title = f"{model}, first {scored[-1]:,} tokens of {text.name}"
    write_comparison(out, title, found)
    note(f"the report is {out / 'report.md'}")
    header, *body = rows(found)
    print_table(title, tuple(header), body)
