"""`jkvq generate`: from a prompt to text."""

import dataclasses
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jkvq.cli.prompts import given_prompts
from jkvq.cli.shared import (
    AsJson,
    CalibrationFolder,
    Check,
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

    from jkvq.engine.generate import Piece
    from jkvq.engine.writer import Generation

_BETWEEN = "---"  # the line between the texts of several prompts


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; - reads it from stdin.", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file of prompts, one a line, which run as one batch; in .jsonl a line is "
            '{"prompt": "..."} or {"messages": [...]}.',
            show_default=False,
        ),
    ] = None,
    model: Model = DEFAULT_MODEL,
    cache: ChosenCache = None,
    calibration: CalibrationFolder = None,
    check: Check = True,
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
    seed: Annotated[
        int | None,
        typer.Option(
            help="With a file each prompt gets one made of it.", show_default="a new one each time"
        ),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the text; may be repeated.")] = None,
    dtype: Dtype = None,
    implementation: Implementation = None,
    as_json: AsJson = False,
):
    """Write on from a prompt, or from each prompt of a file."""
    given = given_prompts(prompt, prompts)
    with spinner("Starting"):
        from jkvq.cache.specs.spec_text import spec_text
        from jkvq.engine.generate import stream
        from jkvq.engine.options import Options
        from jkvq.engine.prompt import as_batch
        from jkvq.loading.load import load

    as_batch(given)  # refuses what is no prompt, before anything is fetched
    options = Options(
        chat=chat,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
    )
    llm = load(
        model,
        cache=cache,
        calibration=calibration,
        dtype=dtype,
        implementation=implementation,
        check=check,
    )
    named = cache or spec_text(llm.spec)
    written = _written(stream(llm, given, options), len(given), show=not as_json)
    failed = [each.error for each in written if each.error is not None]
    if len(failed) == len(written):
        raise UserError(failed[0])
    if as_json:
        for each in written:
            print_json({"model": model, "cache": named, **dataclasses.asdict(each)})
    else:
        _report(written, named)
    if failed:
        note(f"{len(failed)} of {len(written)} prompts failed: {failed[0]}")
        raise typer.Exit(2)


def _written(pieces: "Iterator[Piece]", prompts: int, *, show: bool) -> "list[Generation]":
    """What came of each prompt.

    Texts are shown as they come; those of several prompts in their order, with a line between.
    """
    showing, waiting = 0, [""] * prompts
    done: dict[int, Generation] = {}
    with spinner("Compiling and reading the prompts"):
        first = next(pieces)
    for piece in itertools.chain([first], pieces):
        waiting[piece.index] += piece.text
        if piece.generation is not None:
            done[piece.index] = piece.generation
        while show and showing < prompts:
            print(waiting[showing], end="", flush=True)
            waiting[showing] = ""
            if showing not in done:
                break
            showing += 1
            print(f"\n{_BETWEEN}" if showing < prompts else "", flush=True)
    return [done[index] for index in range(prompts)]


def _report(written: "list[Generation]", cache: str) -> None:
    read = sum(each.prompt_tokens for each in written)
    new = sum(len(each.tokens) for each in written)
    timings = max((each.timings for each in written), key=lambda timings: timings.decode)
    later = new - len(written)  # a prompt's first token is the prefill's
    rate = f", {later / timings.decode:.1f} tokens/s" if later > 0 else ""
    whose = f"seed {written[0].seed}" if len(written) == 1 else f"{len(written)} prompts"
    note(
        f"{read} tokens read, {new} written{rate}; "
        f"{timings.compile:.1f} s of compilation and {timings.fetch:.1f} s for kept programs; "
        f"{cache}; {whose}"
    )
