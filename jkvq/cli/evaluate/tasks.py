"""`jkvq eval tasks`: the papers' tasks through every cache."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jkvq.cli.engine.interrupts import on_ctrl_c
from jkvq.cli.evaluate.shared import (
    Caches,
    Calibrations,
    calibrated,
    choose_calibrations,
    whole_numbers,
)
from jkvq.cli.shared import (
    Actors,
    AsJson,
    Dtype,
    Implementation,
    Model,
    Ray,
    print_json,
    print_table,
    require_positive,
)
from jkvq.defaults import DEFAULT_MODEL, PLAIN_CACHE
from jkvq.support.errors import UserError, nearest
from jkvq.support.progress import note, spinner

if TYPE_CHECKING:
    from jkvq.cache.calibrated import Calibration
    from jkvq.tasks.results import Results
    from jkvq.tasks.task import Task


def eval_tasks(
    out: Annotated[Path, typer.Option(help="The job's folder; what it holds is kept.")],
    tasks: Annotated[
        str,
        typer.Option(
            help="One or more, with commas between: gsm8k, math500, aime24, humaneval, longbench "
            "(these from files), ruler, niah, mrcr (made at any length)."
        ),
    ],
    model: Model = DEFAULT_MODEL,
    cache: Caches = PLAIN_CACHE,
    data: Annotated[Path, typer.Option(help="The folder with the tasks' files.")] = Path("data"),
    lengths: Annotated[
        str, typer.Option(help="Tokens of prompt and answer, of tasks made at any length.")
    ] = "4096",
    limit: Annotated[
        int | None,
        typer.Option(
            help="Problems of each kind and length at most.", show_default="all; of ruler 100"
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Answers to each problem.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", "-n", help="Of an answer.", show_default="the tasks' own"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of problems and answers that are drawn.")] = 0,
    calibration: Calibrations = [],  # noqa: B006 (typer copies it)
    slots: Annotated[
        int | None,
        typer.Option(help="Answers at once.", show_default="8 on a CPU and 64 on a GPU"),
    ] = None,
    ray: Ray = None,
    actors: Actors = None,
    dtype: Dtype = None,
    implementation: Implementation = None,
    as_json: AsJson = False,
):
    """The papers' tasks: what a cache does to answers, with intervals, beside 16 bits.

    Every cache gets the same problems and seeds; bf16 always runs. The folder gets problems,
    answers, scores and a report; the same command goes on where a run was stopped.
    """
    with spinner("Starting"):
        from jkvq.attention.implementation import require_known
        from jkvq.cache.specs.spec_text import parse_spec, split_names
        from jkvq.jobs.batch import Window
        from jkvq.jobs.ray_actors import ray_answerer
        from jkvq.llm import with_cache
        from jkvq.loading.load import load
        from jkvq.models.model import load_model
        from jkvq.tasks.job import TaskJob
        from jkvq.tasks.problems import Sampling
        from jkvq.tasks.task import Setting

    sampling = Sampling(samples, temperature, max_new_tokens, seed)
    chosen, numbers = chosen_tasks(tasks), tuple(whole_numbers("lengths", lengths))
    require_positive(limit=1 if limit is None else limit, lengths=min(numbers))
    require_positive(slots=1 if slots is None else slots, actors=1 if actors is None else actors)
    require_known(implementation)
    names = list(dict.fromkeys([PLAIN_CACHE, *split_names(cache)]))
    for name in names:
        parse_spec(name)  # refuses baselines, which are for other commands
    folders = choose_calibrations(calibration, names)
    plain = load_model(model, dtype=dtype)
    setting = Setting(plain.tokenizer, plain.config.context, data, numbers, limit, seed)

    @functools.cache
    def known(name: str) -> "Calibration | None":
        return calibrated(plain, name, folders[name])

    def answerer(name: str):
        if ray is None:
            llm = with_cache(plain, name, known(name), implementation=implementation)
            return Window(llm, slots=slots).answers
        how = {"cache": name, "calibration": folders[name], "dtype": dtype, "check": False}
        made = functools.partial(load, model, implementation=implementation, **how)
        return ray_answerer(made, ray, actors, slots)

    with on_ctrl_c(functools.partial(how_to_go_on, out)):
        job = TaskJob(out, chosen, known, implementation)
        results = job.run(plain, setting, sampling, names, answerer)
    if as_json:
        print_json({"model": model, "results": _listed(results)})
        return
    _print(results, f"{model}, accuracy in percent and its difference from {PLAIN_CACHE}")


def how_to_go_on(out: Path) -> bool:
    """Says what an interrupted job leaves."""
    note(f"{out} keeps the answers so far; the same command goes on from them")
    return False  # it ends


def chosen_tasks(tasks: str) -> "dict[str, Task]":
    """Tasks by their names, from a list of these."""
    from jkvq.tasks.catalog import TASKS

    names = [name.strip() for name in tasks.split(",")]
    for name in names:
        if name not in TASKS:
            raise UserError(f"task '{name}' is not known: {nearest(name, TASKS)}")
    return {name: TASKS[name] for name in dict.fromkeys(names)}


def _listed(results: "Results") -> list[dict]:
    from jkvq.tasks.report import listed

    return listed(results)


def _print(results: "Results", title: str) -> None:
    from jkvq.tasks.report import overview

    header, *rows = overview(results)
    print_table(title, tuple(header), rows)
