"""`jkvq convert`: a model as a checkpoint of our own."""

from pathlib import Path
from typing import Annotated

import typer

from jkvq.cli.shared import AsJson, Dtype, Model, print_json
from jkvq.defaults import DEFAULT_MODEL


def convert(
    out: Annotated[Path, typer.Option(help="A new folder.")],
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = None,
    as_json: AsJson = False,
):
    """Write a model as a checkpoint that loads faster than the original."""
    from jkvq.loading.convert import convert as convert_checkpoint
    from jkvq.support.memory import format_bytes

    seconds, size = convert_checkpoint(model, out, dtype=dtype)
    if as_json:
        print_json({"model": model, "out": str(out), "bytes": size, "seconds": seconds})
    else:
        print(f"{model} -> {out}: {format_bytes(size)} in {seconds:.1f} s")
        print(f'Use it as the model: jkvq generate "Hello" --model {out}')
