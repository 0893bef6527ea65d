"""The command line. Texts go to stdout, tables too, everything else to stderr."""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated

import jax
import typer

from jkvq.cache_shape import CacheShape
from jkvq.cli_eval import evaluation
from jkvq.cli_shared import AsJson, Cache, Dtype, Model, print_json, print_table
from jkvq.convert import convert as convert_checkpoint
from jkvq.errors import UserError
from jkvq.footprint import bits_per_element, footprint
from jkvq.generate import Piece, stream
from jkvq.llm import DEFAULT_CACHE, DEFAULT_MODEL, compute_dtype, load
from jkvq.memory import format_bytes, free_bytes, parse_bytes
from jkvq.models.catalog import cache_folder
from jkvq.models.checkpoint import open_checkpoint
from jkvq.progress import spinner, stderr
from jkvq.spec import PRESETS, parse_spec

app = typer.Typer(
    help="Language models in JAX with a paged KV cache.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(evaluation, name="eval")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    model: Model = DEFAULT_MODEL,
    cache: Cache = DEFAULT_CACHE,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Wrap the prompt in the model's chat template, or not.",
            show_default="chat if the model has a template",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: Annotated[int | None, typer.Option(show_default="a new one each time")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the text; may be repeated.")] = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
):
    """Write on from a prompt."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise UserError("the prompt is empty: give at least one word")
    llm = load(model, cache=cache, dtype=dtype)
    pieces = stream(
        llm,
        text,
        chat=chat,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or (),
    )
    with spinner("Compiling and reading the prompt"):
        piece = next(pieces)
    while True:
        if not as_json:
            print(piece.text, end="", flush=True)
        if piece.generation is not None:
            break
        piece = next(pieces)
    _report(piece, model, cache, as_json)


def _report(piece: Piece, model: str, cache: str, as_json: bool) -> None:
    generation = piece.generation
    assert generation is not None
    if as_json:
        print_json({"model": model, "cache": cache, **dataclasses.asdict(generation)})
        return
    print()
    new, timings = len(generation.tokens), generation.timings
    rate = f", {(new - 1) / timings.decode:.1f} tokens/s" if new > 1 else ""
    stderr().print(
        f"{generation.prompt_tokens} tokens read, {new} written{rate}; "
        f"{timings.compile:.1f} s of compilation; seed {generation.seed}",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def inspect(
    model: Model = DEFAULT_MODEL,
    cache: Cache = DEFAULT_CACHE,
    context: Annotated[
        int | None, typer.Option(help="Tokens per sequence.", show_default="the model's")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    memory: Annotated[
        str | None,
        typer.Option(help="Such as 24GB or 80GiB.", show_default="what is free here"),
    ] = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
):
    """Show what a model and its cache take of memory, and how many sequences fit."""
    spec, compute = parse_spec(cache), compute_dtype(dtype)
    room = free_bytes() if memory is None else parse_bytes(memory)
    config = open_checkpoint(model).config
    context = config.context if context is None else context
    size = footprint(config, spec, dtype=compute, context=context, batch=batch, memory=room)
    if as_json:
        described = {"model": model, "cache": cache, "context": context, "batch": batch}
        architecture = dataclasses.asdict(config)
        stored = {"architecture": architecture, "memory": room, **dataclasses.asdict(size)}
        print_json(described | stored)
        return
    rows = {
        "architecture": f"{config.family}: {config.layers} layers, width {config.width}, "
        f"{config.heads} query and {config.kv_heads} KV heads of {config.head_dim}",
        f"weights, {jax.numpy.dtype(compute).name}": format_bytes(size.weights),
        "cache per packed token": f"{size.per_packed_token:,.0f} B",
        "16-bit window per sequence": format_bytes(size.window),
        f"cache per sequence of {context:,}": f"{format_bytes(size.per_sequence)}, "
        f"{size.bits_per_element:.2f} bits per element",
        f"cache of {batch:,} sequence(s)": format_bytes(size.cache),
        "weights and cache": format_bytes(size.total),
    }
    if room is not None:
        rows[f"sequences that fit {format_bytes(room)}"] = f"{size.fits:,}"
    print_table(f"{model}, {cache}", ("", ""), rows.items())


@app.command()
def convert(
    out: Annotated[Path, typer.Option(help="A new folder.")],
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = None,
    as_json: AsJson = False,
):
    """Write a model as a checkpoint that loads faster than the original."""
    seconds, size = convert_checkpoint(model, out, dtype=dtype)
    if as_json:
        print_json({"model": model, "out": str(out), "bytes": size, "seconds": seconds})
    else:
        print(f"{model} -> {out}: {format_bytes(size)} in {seconds:.1f} s")
        print(f'Use it as the model: jkvq generate "Hello" --model {out}')


@app.command()
def methods(
    head_dim: Annotated[int, typer.Option(help="Channels per head.")] = 128,
    context: Annotated[int, typer.Option(help="Tokens per sequence.")] = 131072,
    as_json: AsJson = False,
):
    """List the caches by name, with what they store."""
    shape, listed = CacheShape(1, 1, head_dim), {}
    for name, preset in PRESETS.items():
        try:
            preset.spec.check(1, head_dim, context)
        except UserError:  # not for heads or contexts of this size
            continue
        listed[name] = {
            "bits_per_element": bits_per_element(preset.spec, shape, context),
            "calibrated": preset.spec.key.calibrated or preset.spec.value.calibrated,
            "about": preset.about,
        }
    if as_json:
        print_json({"head_dim": head_dim, "context": context, "methods": listed})
        return
    rows = (
        (
            name,
            f"{found['bits_per_element']:.3f}",
            "yes" if found["calibrated"] else "",
            found["about"],
        )
        for name, found in listed.items()
    )
    title = f"Caches; bits per element for heads of {head_dim} at {context:,} tokens"
    print_table(title, ("name", "bits", "calibrated", "what it stores"), rows)


def main() -> None:
    """Runs the command line; a UserError ends in its sentence and exit code 2."""
    compiled = str(cache_folder() / "compiled")
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", compiled)
    try:
        app()
    except UserError as error:
        stderr().print(f"jkvq: {error}", style="red", soft_wrap=True, highlight=False, markup=False)
        sys.exit(2)
