"""`jkvq eval ppl`: perplexity, and KL against the 16-bit cache."""

import dataclasses
from typing import Annotated

import typer

from jkvq.cli.evaluate.shared import (
    Caches,
    Calibrations,
    Text,
    Tokens,
    calibrated,
    choose_calibrations,
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
    implementation: Implementation = None,
    as_json: AsJson = False,
):
    """Perplexity of a text's first tokens, and KL of the next token against the 16-bit cache.

    Beside the caches of `jkvq caches` it takes the baselines kivi-int2, kivi-int4, kitty-int2 and
    kitty25-int2. The 16-bit cache is always run.
    """
    from jkvq.attention.implementation import require_known
    from jkvq.cache.specs.spec_text import split_names
    from jkvq.evaluation.corpus import first_tokens, leading_tokens, read_text
    from jkvq.evaluation.perplexity import compare
    from jkvq.evaluation.subjects import subject
    from jkvq.models.model import load_model

    require_positive(tokens=tokens)
    names, content = split_names(cache), read_text(text)
    names = names if PLAIN_CACHE in names else [PLAIN_CACHE, *names]
    require_known(implementation)
    folders = choose_calibrations(calibration, names)
    plain = load_model(model, dtype=dtype)
    chosen = first_tokens(plain.tokenizer, content, tokens)
    subjects = {
        name: subject(plain, name, calibrated(plain, name, folder), implementation=implementation)
        for name, folder in folders.items()
    }
    asked = {"context": context, "stride": stride, "position": position}
    leading = len(leading_tokens(plain.tokenizer))
    results = compare(subjects, chosen, reference=PLAIN_CACHE, leading=leading, **asked)
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
