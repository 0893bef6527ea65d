"""The command line. Texts go to stdout, tables too, everything else to stderr."""

import dataclasses
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import jax
import typer

from jkvq.cache.calibrated import methods_for
from jkvq.cache.footprint import bits_per_element, footprint
from jkvq.cache.presets import PRESETS
from jkvq.cache.shape import CacheShape
from jkvq.cache.spec_text import parse_spec, spec_text
from jkvq.calibration.allocation import SCORES
from jkvq.calibration.artefact import default_folder, load_artefact
from jkvq.calibration.drawing import draw
from jkvq.calibration.explain import explain
from jkvq.calibration.rotations import FACTORS
from jkvq.calibration.solve import KEY_TARGETS, METHODS, VALUE_TARGETS, Options
from jkvq.cli.evaluate import evaluation
from jkvq.cli.shared import (
    AsJson,
    CalibrationFolder,
    ChosenCache,
    Dtype,
    Model,
    print_json,
    print_table,
)
from jkvq.engine.generate import Piece, stream
from jkvq.llm import DEFAULT_MODEL, compute_dtype, weight_bytes
from jkvq.loading.calibrate import DEFAULT_TOKENS
from jkvq.loading.calibrate import calibrate as calibrate_model
from jkvq.loading.convert import convert as convert_checkpoint
from jkvq.loading.load import DEFAULT_CACHES, default_cache, load
from jkvq.models.formats.catalog import cache_folder
from jkvq.models.formats.checkpoint import open_checkpoint
from jkvq.support.errors import CacheWarning, UserError
from jkvq.support.memory import format_bytes, free_bytes, parse_bytes
from jkvq.support.progress import note, spinner, stderr

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
    cache: ChosenCache = None,
    calibration: CalibrationFolder = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="On a cache's first use with a model, measure whether it breaks the model.",
        ),
    ] = True,
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
    implementation: Annotated[
        str | None,
        typer.Option(
            help="pallas (GPU kernels), reference or interpret.", show_default="the best here"
        ),
    ] = None,
    as_json: AsJson = False,
):
    """Write on from a prompt."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise UserError("the prompt is empty: give at least one word")
    llm = load(
        model,
        cache=cache,
        calibration=calibration,
        dtype=dtype,
        implementation=implementation,
        check=check,
    )
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
    _report(piece, model, cache or spec_text(llm.spec), as_json)


def _report(piece: Piece, model: str, cache: str, as_json: bool) -> None:
    generation = piece.generation
    assert generation is not None
    if as_json:
        print_json({"model": model, "cache": cache, **dataclasses.asdict(generation)})
        return
    print()
    new, timings = len(generation.tokens), generation.timings
    rate = f", {(new - 1) / timings.decode:.1f} tokens/s" if new > 1 else ""
    note(
        f"{generation.prompt_tokens} tokens read, {new} written{rate}; "
        f"{timings.compile:.1f} s of compilation; {cache}; seed {generation.seed}"
    )


@app.command()
def calibrate(
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "jkvq",
    model: Model = DEFAULT_MODEL,
    text: Annotated[
        Path | None,
        typer.Option(
            help="A text file; .gz is read as it is.",
            show_default="the prose of Python's documentation",
        ),
    ] = None,
    self_written: Annotated[
        bool, typer.Option("--self", help="Calibrate on text that the model writes.")
    ] = False,
    tokens: Annotated[
        int, typer.Option(help="How many, from the text's beginning.")
    ] = DEFAULT_TOKENS,
    out: Annotated[
        Path | None,
        typer.Option(help="A new folder.", show_default="where --cache finds it for this model"),
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="One rotation for all KV heads of a layer.")
    ] = Options.shared,
    key_target: Annotated[
        str, typer.Option(help=f"What turns OSCAR's keys: {', '.join(KEY_TARGETS)}.")
    ] = Options.key_target,
    value_target: Annotated[
        str,
        typer.Option(help=f"What turns OSCAR's values: {', '.join(VALUE_TARGETS)}."),
    ] = Options.value_target,
    without: Annotated[
        list[str] | None,
        typer.Option(help=f"Leave out of OSCAR's rotation: {', '.join(FACTORS)}; may be repeated."),
    ] = None,
    order: Annotated[
        int | None,
        typer.Option(
            help="Of the block Hadamard behind the Hessian rotation.",
            show_default="the largest up to 128",
        ),
    ] = Options.order,
    centroids: Annotated[int, typer.Option(help="Of k-means.")] = Options.centroids,
    starts: Annotated[int, typer.Option(help="Of k-means; the best is kept.")] = Options.starts,
    seed: Annotated[int, typer.Option(help="Of k-means.")] = Options.seed,
    score: Annotated[
        str, typer.Option(help=f"What a rotary block is worth: {', '.join(SCORES)}.")
    ] = Options.score,
    clip_for: Annotated[
        str | None,
        typer.Option(help="Choose the clip ratios of each layer for this cache, as oscar-int2."),
    ] = Options.clip_for,
    window: Annotated[int, typer.Option(help="Tokens that see each other.")] = Options.window,
    context: Annotated[
        int | None,
        typer.Option(
            help="The longest sequence that caches are to serve.", show_default="the model's"
        ),
    ] = Options.context,
    dtype: Dtype = None,
    as_json: AsJson = False,
):
    """Read a text with a model, and write what calibrated caches need to know.

    Methods: jkvq (means and rotations, for jkvq-*), oscar, hessian, kmeans, blockgtq,
    center (means alone, for any cache with center=true).
    """
    artefact = calibrate_model(
        model,
        method=method,
        text=text,
        self_written=self_written,
        tokens=tokens,
        out=out,
        dtype=dtype,
        shared=shared,
        key_target=key_target,
        value_target=value_target,
        without=tuple(without or ()),
        order=order,
        centroids=centroids,
        starts=starts,
        seed=seed,
        score=score,
        clip_for=clip_for,
        window=window,
        context=context,
    )
    manifest = artefact.manifest
    folder = default_folder(model, manifest.method) if out is None else out
    if as_json:
        print_json({"out": str(folder), **dataclasses.asdict(manifest)})
        return
    print(f"{model} by {manifest.method} on {tokens:,} tokens of {manifest.corpus} -> {folder}")
    given = "" if out is None else f" --calibration {out}"
    for name in (*PRESETS, *DEFAULT_CACHES):
        if manifest.method in methods_for(parse_spec(name))[:1]:
            print(f'Use it: jkvq generate "Hello" --model {model} --cache {name}{given}')
            return


@app.command()
def inspect(
    folder: Annotated[
        Path | None, typer.Argument(help="A calibration to explain, instead of a model.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the calibration into this PNG file.")
    ] = None,
    model: Model = DEFAULT_MODEL,
    cache: ChosenCache = None,
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
    """Show what a model and its cache take of memory, or explain a calibration."""
    if folder is not None:
        _inspect_calibration(folder, plot, as_json)
        return
    if plot is not None:
        raise UserError("--plot draws a calibration: name its folder")
    named, compute = None if cache is None else parse_spec(cache), compute_dtype(dtype)
    room = free_bytes() if memory is None else parse_bytes(memory)
    config = open_checkpoint(model).config
    spec = default_cache(config)[0] if named is None else named
    cache = cache or spec_text(spec)
    context = config.context if context is None else context
    weights = weight_bytes(config, compute)
    size = footprint(config, spec, weights=weights, context=context, batch=batch, memory=room)
    if as_json:
        described = {"model": model, "cache_name": cache, "context": context, "batch": batch}
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


def _inspect_calibration(folder: Path, plot: Path | None, as_json: bool) -> None:
    artefact = load_artefact(folder)
    if plot is not None:
        draw(artefact, plot)
    if as_json:
        print_json({**dataclasses.asdict(artefact.manifest), "says": explain(artefact)})
        return
    for line in explain(artefact):
        print(line)
    if plot is not None:
        print(f"Drawn in {plot}.")


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


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    if issubclass(category, CacheWarning):
        stderr().print(
            f"jkvq: {message}", style="yellow", soft_wrap=True, highlight=False, markup=False
        )
    else:
        _show_other_warning(message, category, filename, lineno, file, line)


_show_other_warning = warnings.showwarning


def main() -> None:
    """Runs the command line; a UserError ends in its sentence and exit code 2."""
    warnings.showwarning = _show_warning
    compiled = str(cache_folder() / "compiled")
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", compiled)
    try:
        app()
    except UserError as error:
        stderr().print(f"jkvq: {error}", style="red", soft_wrap=True, highlight=False, markup=False)
        sys.exit(2)
