"""`jkvq eval fidelity`: what caches do to a model, layer by layer."""

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from jkvq.cli.evaluate.shared import (
    Caches,
    Calibrations,
    Plot,
    Text,
    Tokens,
    calibrated,
    choose_calibrations,
)
from jkvq.cli.shared import AsJson, Dtype, Model, print_json, print_table, require_positive
from jkvq.defaults import DEFAULT_MODEL

if TYPE_CHECKING:
    from jkvq.evaluation.fidelity import Fidelity


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
    from jkvq.cache.specs.spec_text import split_names
    from jkvq.evaluation.compared import cache_of
    from jkvq.evaluation.corpus import first_tokens, read_text
    from jkvq.evaluation.fidelity import fidelity
    from jkvq.evaluation.plots import fidelity_figure
    from jkvq.evaluation.subjects import reconstruction
    from jkvq.models.model import load_model
    from jkvq.support.pictures import check_picture, save_picture

    require_positive(tokens=tokens)
    names, content = split_names(cache), read_text(text)
    check_picture(plot)
    folders = choose_calibrations(calibration, names)
    plain = load_model(model, dtype=dtype)
    chosen = first_tokens(plain.tokenizer, content, tokens)
    caches = {
        name: reconstruction(plain, cache_of(name), calibrated(plain, name, folder))
        for name, folder in folders.items()
    }
    found = fidelity(plain, chosen, caches)
    title = f"{model}, first {tokens:,} tokens of {text.name}"
    if plot is not None:
        save_picture(fidelity_figure(found, title), plot)
    if as_json:
        listed = {
            name: [dataclasses.asdict(layer) for layer in each] for name, each in found.items()
        }
        print_json({"model": model, "tokens": tokens, "layers": listed})
        return
    if layers:
        _print_layers(found, title)
    _print_means(found, title)


def _print_layers(found: "Mapping[str, Sequence[Fidelity]]", title: str) -> None:
    for name, each in found.items():
        rows = (
            (str(i), *(f"{x:.3g}" for x in dataclasses.astuple(layer)))
            for i, layer in enumerate(each)
        )
        print_table(f"{title}: {name}", ("layer", *_measures(found)), rows)


def _print_means(found: "Mapping[str, Sequence[Fidelity]]", title: str) -> None:
    rows = (
        (measure, *(f"{fmean(getattr(x, measure) for x in each):.3g}" for each in found.values()))
        for measure in _measures(found)
    )
    print_table(f"{title}: mean over layers", ("", *found), rows)


def _measures(found: "Mapping[str, Sequence[Fidelity]]") -> list[str]:
    first = next(iter(found.values()))[0]
    return [field.name for field in dataclasses.fields(first)]
