"""`jkvq eval`: the commands that measure."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from jkvq.cli_shared import AsJson, Dtype, Model, print_json, print_table
from jkvq.evaluate import first_tokens, perplexity, read_text
from jkvq.llm import DEFAULT_CACHE, DEFAULT_MODEL, checked_basis, load, with_cache
from jkvq.spec import split_specs

evaluation = typer.Typer(help="Measure a model through its cache.", no_args_is_help=True)


@evaluation.command("ppl")
def eval_ppl(
    text: Annotated[Path, typer.Option(help="A text file; .gz is read as it is.")],
    model: Model = DEFAULT_MODEL,
    cache: Annotated[str, typer.Option(help="One or more, with commas between.")] = DEFAULT_CACHE,
    tokens: Annotated[int, typer.Option(help="How many, from the text's beginning.")] = 1024,
    dtype: Dtype = None,
    as_json: AsJson = False,
):
    """Perplexity of a text's first tokens."""
    specs, content = split_specs(cache), read_text(text)
    llm = load(model, dtype=dtype)
    for spec in specs.values():
        checked_basis(llm.config, spec, None)
    scored = first_tokens(llm, content, tokens)
    results = {name: perplexity(with_cache(llm, spec), scored) for name, spec in specs.items()}
    if as_json:
        found = {name: dataclasses.asdict(result) for name, result in results.items()}
        print_json({"model": model, "tokens": tokens, "results": found})
        return
    rows = ((name, f"{r.ppl:.3f}", f"{r.nll:.4f}") for name, r in results.items())
    title = f"{model}, first {tokens:,} tokens of {text.name}"
    print_table(title, ("cache", "perplexity", "nats per token"), rows)
