"""`jkvq generate`: from a prompt to text."""

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from jkvq.cli.shared import (
    AsJson,
    CalibrationFolder,
    ChosenCache,
    Dtype,
    Implementation,
    Model,
    print_json,
)
from jkvq.defaults import DEFAULT_MODEL
from jkvq.support.errors import UserError
from jkvq.support.progress import note, spinner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jkvq.engine.generate import Generation, Piece


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
    implementation: Implementation = None,
    as_json: AsJson = False,
):
    """Write on from a prompt."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise UserError("the prompt is empty: give at least one word")
    with spinner("Starting"):
        from jkvq.cache.specs.spec_text import spec_text
        from jkvq.engine.generate import stream
        from jkvq.loading.load import load

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
    generation = _written(pieces, show=not as_json)
    if generation.error is not None:
        raise UserError(generation.error)
    named = cache or spec_text(llm.spec)
    if as_json:
        print_json({"model": model, "cache": named, **dataclasses.asdict(generation)})
    else:
        _report(generation, named)


def _written(pieces: "Iterator[Piece]", *, show: bool) -> "Generation":
    """What the last piece says of the whole; texts are shown as they come."""
    with spinner("Compiling and reading the prompt"):
        piece = next(pieces)
    while True:
        if show:
            print(piece.text, end="", flush=True)
        if piece.generation is not None:
            return piece.generation
        piece = next(pieces)


def _report(generation: "Generation", cache: str) -> None:
    print()
    new, timings = len(generation.tokens), generation.timings
    rate = f", {(new - 1) / timings.decode:.1f} tokens/s" if new > 1 else ""
    note(
        f"{generation.prompt_tokens} tokens read, {new} written{rate}; "
        f"{timings.compile:.1f} s of compilation and {timings.fetch:.1f} s for kept programs; "
        f"{cache}; seed {generation.seed}"
    )
