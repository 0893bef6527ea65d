"""`jkvq eval ppl`: perplexity, and KL against the 16-bit cache."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from jkvq.cli.evaluate.shared import (
    Caches,
    Calibrations,
    Plot,
    Text,
    Windows,
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
from jkvq.support.errors import UserError

if TYPE_CHECKING:
    from jkvq.evaluation.perplexity import Score


def eval_ppl(
    text: Text,
    model: Model = DEFAULT_MODEL,
    cache: Caches = PLAIN_CACHE,
    tokens: Annotated[
        str,
        typer.Option(help="How many, from the text's beginning; several with commas between."),
    ] = "1024",
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of a window.", show_default="all tokens in one window"),
    ] = None,
    calibration: Calibrations = [],  # noqa: B006 (typer copies it)
    stride: Annotated[
        int | None,
        typer.Option(
            help="Tokens from a window to the next.", show_default="what a window holds of the text"
        ),
    ] = None,
    position: Annotated[
        int, typer.Option(help="Where a window's first token stands in the model's context.")
    ] = 0,
    windows: Windows = None,
    plot: Plot = None,
    dtype: Dtype = None,
    implementation: Implementation = None,
    as_json: AsJson = False,
):
    """Perplexity of a text's first tokens, and KL of the next token against the 16-bit cache.

    Beside the caches of `jkvq caches` it takes the baselines kivi-int2, kivi-int4, kitty-int2 and
    kitty25-int2. The 16-bit cache is always run. Several lengths, such as 2048,8192, are scored in
    one reading of the text. jkvq-int2,calibration=DIR is a cache with a calibration of its own.
    """
    from jkvq.attention.implementation import require_known
    from jkvq.cache.specs.spec_text import split_names
    from jkvq.evaluation.compared import cache_of, in_windows, read_windows
    from jkvq.evaluation.corpus import first_tokens, leading_tokens, read_text
    from jkvq.evaluation.perplexity import compare_lengths
    from jkvq.evaluation.plots import kl_figure
    from jkvq.evaluation.subjects import subject
    from jkvq.models.model import load_model
    from jkvq.support.pictures import check_picture, save_picture

    lengths = sorted(set(whole_numbers("tokens", tokens)))
    require_positive(tokens=lengths[0])
    names, content = split_names(cache), read_text(text)
    names = names if PLAIN_CACHE in names else [PLAIN_CACHE, *names]
    names = in_windows(names, [] if windows is None else read_windows(windows))
    require_known(implementation)
    check_picture(plot)
    if plot is not None and names == [PLAIN_CACHE]:
        raise UserError(f"--plot draws KL from {PLAIN_CACHE}: name another cache with --cache")
    folders = choose_calibrations(calibration, names)
    plain = load_model(model, dtype=dtype)
    chosen = first_tokens(plain.tokenizer, content, lengths[-1])
    known = {name: calibrated(plain, name, folder) for name, folder in folders.items()}
    subjects = {
        name: subject(plain, cache_of(name), found, implementation=implementation)
        for name, found in known.items()
    }
    asked = {"context": context, "stride": stride, "position": position}
    leading = len(leading_tokens(plain.tokenizer))
    results = compare_lengths(
        subjects, chosen, lengths, reference=PLAIN_CACHE, leading=leading, **asked
    )
    if plot is not None:
        save_picture(kl_figure(results, f"{model}, {text.name}"), plot)
    if as_json:
        found = {
            length: {name: dataclasses.asdict(score) for name, score in scores.items()}
            for length, scores in results.items()
        }
        print_json({"model": model, **asked, "reference": PLAIN_CACHE, "results": found})
        return
    for length, scores in results.items():
        title = f"{model}, first {length:,} tokens of {text.name}"
        if context is not None:
            title += f", windows of {context:,}" + (f" every {stride:,}" if stride else "")
        if position:
            title += f", from position {position:,}"
        _print_scores(title, scores)


def _print_scores(title: str, scores: "Mapping[str, Score]") -> None:
    rows = (
        (name, f"{r.bits_per_element:.3f}", f"{r.ppl:,.3f}", f"{r.nll:.4f}", f"{r.kl:.4f}")
        for name, r in scores.items()
    )
    print_table(title, ("cache", "bits", "perplexity", "nats per token", "KL"), rows)
