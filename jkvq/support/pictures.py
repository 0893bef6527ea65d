"""Pictures as PNG files: one look for all, and colours that any eyes tell apart."""

from pathlib import Path
from typing import TYPE_CHECKING

from jkvq.support.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any colour vision tell apart; yellow, which is faint
# on white, is left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")  # a line beyond the colours takes the next style
MARKERS = ("o", "s", "^", "D", "v")
SEQUENTIAL = "viridis"  # brighter is more


def check_picture(path: Path | None) -> None:
    """Refuses, before any work, a picture that could not be written."""
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise UserError(f"{path}: a picture is written as PNG; name it like picture.png")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; make it first")


def line_look(index: int) -> dict[str, str]:
    """Colour and style of the line number ``index`` of a picture."""
    style = STYLES[index // len(COLOURS) % len(STYLES)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": style}


def new_figure(width: float, height: float, title: str) -> "Figure":
    """An empty figure of so many inches, whose parts make room for each other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (takes a second)
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    return figure


def save_picture(figure: "Figure", path: Path) -> None:
    """Writes a figure as PNG."""
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
