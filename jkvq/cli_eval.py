"""`jkvq eval`: the commands that measure."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from jkvq.cli_shared import AsJson, Dtype, Model, print_json, print_table
from jkvq.evaluate import (
    choose_calibration,
    compare,
    first_tokens,
    read_text,
    reconstruction,
    subject,
)
from jkvq.fidelity import Fidelity, fidelity
from jkvq.llm import DEFAULT_CACHE, DEFAULT_MODEL, load
from jkvq.plots import check_plot, draw_fidelity
from jkvq.spec import split_names

evaluation = typer.Typer(help="Measure a model through its cache.", no_args_is_help=True)

_REFERENCE = "bf16"  # what the caches are compared with

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
    cache: Caches = DEFAULT_CACHE,
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
    dtype: Dtype = None,
    as_json: AsJson = False,
):
    """Perplexity of a text's first tokens, and KL of the next token against the 16-bit cache.

    Beside the caches of `jkvq methods` it takes the baselines kivi-int2, kivi-int4, kitty-int2 and
    kitty25-int2. The 16-bit cache is always run.
    """
    names, content = split_names(cache), read_text(text)
    names = names if _REFERENCE in names else [_REFERENCE, *names]
    folders = {name: choose_calibration(calibration, name) for name in names}
    llm = load(model, dtype=dtype)
    chosen = first_tokens(llm, content, tokens)
    subjects = {name: subject(llm, name, folder) for name, folder in folders.items()}
    results = compare(subjects, chosen, reference=_REFERENCE, context=context, stride=stride)
    if as_json:
        found = {name: dataclasses.asdict(result) for name, result in results.items()}
        described = {"model": model, "tokens": tokens, "context": context, "stride": stride}
        print_json({**described, "reference": _REFERENCE, "results": found})
        return
    rows = (
        (name, f"{r.bits_per_element:.3f}", f"{r.ppl:,.3f}", f"{r.nll:.4f}", f"{r.kl:.4f}")
        for name, r in results.items()
    )
    title = f"{model}, first {tokens:,} tokens of {text.name}"
    if context is not None:
        title += f", windows of {context:,} every {stride or context:,}"
    print_table(title, ("cache", "bits", "perplexity", "nats per token", "KL"), rows)


@evaluation.command("fidelity")
def eval_fidelity(
    text: Text,
    model: Model = DEFAULT_MODEL,
    cache: Caches = "int4,saw-int4",
    tokens: Tokens = 1024,
    calibration: Calibrations = [],  # noqa: B006 (typer copies it)
    plot: Plot = None,
    layers: Annotated[bool, typer.Option(help="Print every layer, not only the mean.")] = False,
    dtype: Dtype = None,
    as_json: AsJson = False,
):
    """What caches do to keys, values, scores, outputs and hidden states, layer by layer.

    Takes the baselines kivi-int2, kivi-int4, kitty-int2 and kitty25-int2 too.
    """
    names, content = split_names(cache), read_text(text)
    check_plot(plot)
    folders = {name: choose_calibration(calibration, name) for name in names}
    llm = load(model, dtype=dtype)
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
    rows = []
    for name, each in found.items():
        if layers:
            rows += [(name, str(i), *_figures(vars(layer))) for i, layer in enumerate(each)]
        mean = {key: fmean(getattr(layer, key) for layer in each) for key in measures}
        mean["hidden"] = each[-1].hidden
        rows.append((name, "mean", *_figures(mean)))
    print_table(title, ("cache", "layer", *measures), rows)
    print("hidden in the mean's row is that of the last layer")


def _figures(values: Mapping[str, float]) -> list[str]:
    return [f"{value:.3g}" for value in values.values()]
