"""`jkvq eval`: the commands that measure."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from jkvq.cli_shared import AsJson, Dtype, Model, print_json, print_table
from jkvq.evaluate import check_cache, compare, first_tokens, read_text, subject
from jkvq.llm import DEFAULT_CACHE, DEFAULT_MODEL, load
from jkvq.spec import split_names

evaluation = typer.Typer(help="Measure a model through its cache.", no_args_is_help=True)

_REFERENCE = "bf16"  # what the caches are compared with

Text = Annotated[Path, typer.Option(help="A text file; .gz is read as it is.")]
Caches = Annotated[str, typer.Option("--cache", help="One or more, with commas between.")]
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
    llm = load(model, dtype=dtype)
    for name in names:
        check_cache(llm.config, name)
    chosen = first_tokens(llm, content, tokens)
    subjects = {name: subject(llm, name) for name in names}
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
