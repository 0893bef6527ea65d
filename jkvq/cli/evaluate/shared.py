"""What the commands of `jkvq eval` share: their options, and calibrations on first use."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jkvq.support.errors import UserError

if TYPE_CHECKING:
    from jkvq.cache.calibrated import Calibration
    from jkvq.models.model import Model

Text = Annotated[Path, typer.Option(help="A text file; .gz is read as it is.")]
Caches = Annotated[str, typer.Option("--cache", help="One or more, with commas between.")]
Calibrations = Annotated[
    list[Path],
    typer.Option(
        help="A folder that `jkvq calibrate` wrote, for the caches it serves; may be repeated.",
        show_default="those kept for the model, made on first use",
    ),
]
Windows = Annotated[
    str | None,
    typer.Option(
        help="16-bit tokens at the beginning and at the end that each cache is measured with too, "
        "such as none,64+64,64+256.",
        show_default="its own",
    ),
]
Plot = Annotated[Path | None, typer.Option(help="Draw it too, as PNG.", show_default=False)]
Tokens = Annotated[int, typer.Option(help="How many, from the text's beginning.")]


def whole_numbers(name: str, text: str) -> list[int]:
    """The numbers of an option that takes several."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{name}={text}: whole numbers with commas between") from None


def choose_calibrations(folders: Sequence[Path], caches: Sequence[str]) -> dict[str, Path | None]:
    """The folder that serves each cache or baseline; None is the calibration kept for the model.

    Names are as `evaluation/compared.py` has them.
    """
    from jkvq.evaluation.compared import cache_of, folder_of
    from jkvq.evaluation.subjects import choose_calibration

    own = {name: folder for name in caches if (folder := folder_of(name)) is not None}
    chosen = {
        name: choose_calibration([own[name]] if name in own else folders, cache_of(name))
        for name in caches
    }
    useless = {folder: caches for folder in folders if folder not in chosen.values()}
    useless |= {folder: [cache_of(name)] for name, folder in own.items() if chosen[name] is None}
    if useless:
        folder, names = next(iter(useless.items()))
        raise UserError(
            f"the calibration {folder} is of no use to {', '.join(names)}: leave it out, or name a "
            "cache that it serves (`jkvq inspect` explains it)"
        )
    return chosen


def calibrated(model: "Model", cache: str, folder: Path | None) -> "Calibration | None":
    """What a cache needs to know of a model, from the folder, as kept for it, or made now."""
    from jkvq.cache.specs.spec_text import parse_spec
    from jkvq.evaluation.baselines import BASELINES
    from jkvq.evaluation.compared import cache_of
    from jkvq.llm import find_calibration
    from jkvq.loading.load import calibration_for

    cache = cache_of(cache)
    if cache in BASELINES:
        return None
    spec = parse_spec(cache)
    given = None if folder is None else find_calibration(model.name, spec, folder)
    return calibration_for(model, spec, given)
