"""An artefact as a picture."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jkvq.calibration.artefact import Artefact
from jkvq.support.errors import UserError

_DRAWN_BITS = (2, 3)  # the budgets whose allocations are drawn


class _Panel(NamedTuple):
    title: str
    data: Float[np.ndarray, "rows columns"]
    across: str
    lines: bool = False  # one for each row, else a map
    limits: tuple[float, float] | None = None  # of the colours


def draw(artefact: Artefact, path: Path) -> None:
    """Draws spectra and energies before and after rotation, or widths, or means, as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (takes a second)
    from matplotlib.figure import Figure  # noqa: PLC0415

    if path.suffix.lower() != ".png":
        raise UserError(f"{path}: a picture is written as PNG; name it like calibration.png")
    rows = _spectra(artefact) or _widths(artefact) or _means(artefact)
    figure = Figure(figsize=(5 * len(rows[0]), 4 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for axes, panel in zip(grid.flat, (panel for row in rows for panel in row), strict=True):
        axes.set_title(panel.title)
        axes.set_xlabel(panel.across)
        if panel.lines:
            for index, line in enumerate(panel.data):
                axes.plot(line, color=_shade(index, len(panel.data)), linewidth=0.8)
            axes.set_yscale("log")
        else:
            low, high = panel.limits or (None, None)
            image = axes.imshow(
                panel.data, aspect="auto", interpolation="nearest", vmin=low, vmax=high
            )
            figure.colorbar(image, ax=axes)
            axes.set_ylabel("heads, layer by layer")
    manifest = artefact.manifest
    figure.suptitle(f"{manifest.model}, {manifest.method}, {manifest.tokens:,} tokens")
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def _shade(index: int, count: int) -> tuple[float, float, float]:
    depth = 0.85 - 0.75 * index / max(1, count - 1)
    return (depth, depth, 0.9)


def _spectra(artefact: Artefact) -> list[list[_Panel]]:
    rows = []
    for name, spectra in (("keys", artefact.key), ("values", artefact.value)):
        if spectra.eigenvalues is None:
            continue
        assert spectra.energy_before is not None
        assert spectra.energy_after is not None
        before, after = (
            _by_head(np.log10(np.maximum(energy / energy.mean(-1, keepdims=True), 1e-4)))
            for energy in (spectra.energy_before, spectra.energy_after)
        )
        limits = (float(before.min()), float(before.max()))
        rows.append(
            [
                _Panel(
                    f"{name}: eigenvalues of the target",
                    np.maximum(spectra.eigenvalues.mean(1), 1e-12),
                    "direction; light: first layer, dark: last",
                    lines=True,
                ),
                _Panel(f"{name}: log10 energy over mean", before, "channel", limits=limits),
                _Panel("the same after rotation", after, "channel", limits=limits),
            ]
        )
    return rows


def _widths(artefact: Artefact) -> list[list[_Panel]]:
    widths = artefact.calibration.key.widths
    if widths is None:
        return []
    return [
        [
            _Panel(
                f"keys: bits of each block, {bits} on average",
                _by_head(widths[bits - 1]),
                "rotary block, fastest first",
                limits=(1, 8),
            )
            for bits in _DRAWN_BITS
        ]
    ]


def _means(artefact: Artefact) -> list[list[_Panel]]:
    calibration = artefact.calibration
    sides = (("keys", calibration.key), ("values", calibration.value))
    means = ((name, side.all_tokens.mean) for name, side in sides)
    return [[_Panel(f"{name}: mean", _by_head(x), "channel") for name, x in means if x is not None]]


def _by_head(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1])
