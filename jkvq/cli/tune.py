"""`jkvq tune`: a cache whose layers have widths of their own, to a target."""

from pathlib import Path
from typing import Annotated

import typer

from jkvq.cli.shared import AsJson, Dtype, Model, TextOrProse, print_json
from jkvq.defaults import DEFAULT_MODEL


def tune(
    model: Model = DEFAULT_MODEL,
    bits: Annotated[
        float | None, typer.Option(help="At most so many for each number that is stored.")
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(help="The KL from the 16-bit cache, at most; with as few bits as can be."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="For weights and cache together, such as 24GB.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens per sequence, for --bits and --memory.", show_default="the model's"
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences, for --memory.")] = 1,
    text: TextOrProse = None,
    window: Annotated[int, typer.Option(help="Tokens that see each other.")] = 2048,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="A folder of method jkvq.", show_default="the one kept for the model, or made now"
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="What the cache is called from now on.")] = "tuned",
    out: Annotated[
        Path | None,
        typer.Option(
            help="A new folder for the calibration that the cache lies in.",
            show_default="where --cache finds it for this model",
        ),
    ] = None,
    dtype: Dtype = "float32",
    as_json: AsJson = False,
):
    """Choose how many bits each layer's keys and values get, to a target that you give."""
    from jkvq.loading.tune import tune as tune_cache

    tuned = tune_cache(
        model,
        bits=bits,
        max_kl=max_kl,
        memory=memory,
        context=context,
        batch=batch,
        text=text,
        window=window,
        calibration=calibration,
        name=name,
        out=out,
        dtype=dtype,
    )
    if as_json:
        found = {"name": name, "cache": tuned.text, "bits": tuned.bits, "kl": tuned.kl}
        print_json({"model": model, "out": str(tuned.folder), **found})
        return
    print(f"{name} is {tuned.text}")
    print(f"{tuned.bits:.3f} bits, KL {tuned.kl:.3g} on text that nothing was chosen by")
    given = "" if out is None else f" --calibration {out}"
    print(f'Use it: jkvq generate "Hello" --model {model} --cache {name}{given}')
