"""An artefact as a picture."""

from pathlib import Path

import numpy as np

from jkvq.calibration.artefact import Artefact
from jkvq.errors import UserError

_DRAWN_BITS = 3  # the budget whose allocation is drawn


def draw(artefact: Artefact, path: Path) -> None:
    """Draws spectra, energies before and after rotation, means and widths, layer by layer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (takes a second)
    from matplotlib.figure import Figure  # noqa: PLC0415

    if path.suffix.lower() != ".png":
        raise UserError(f"{path}: a picture is written as PNG; name it like calibration.png")
    panels = _panels(artefact)
    figure = Figure(figsize=(5.5 * len(panels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (kind, title, data) in zip(row, panels, strict=True):
        axes.set_title(title)
        if kind == "lines":
            for layer, line in enumerate(data):
                axes.plot(line, color=_shade(layer, len(data)), linewidth=0.8)
            axes.set_yscale("log")
            axes.set_xlabel("direction, by eigenvalue; light: first layer, dark: last")
        else:
            image = axes.imshow(data, aspect="auto", interpolation="nearest")
            figure.colorbar(image, ax=axes)
            axes.set_xlabel("rotary block" if kind == "widths" else "channel")
            axes.set_ylabel("layer, its heads one below the other")
    manifest = artefact.manifest
    figure.suptitle(f"{manifest.model}, {manifest.method}, {manifest.tokens:,} tokens")
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def _shade(index: int, count: int) -> tuple[float, float, float]:
    depth = 0.85 - 0.75 * index / max(1, count - 1)
    return (depth, depth, 0.9)


def _panels(artefact: Artefact) -> list[tuple[str, str, np.ndarray]]:
    """(kind, title, data) of all there is to draw."""
    panels = []
    for name, spectra in (("keys", artefact.key), ("values", artefact.value)):
        if spectra.eigenvalues is None:
            continue
        values = np.maximum(spectra.eigenvalues.mean(1), 1e-12)
        panels.append(("lines", f"{name}: eigenvalues of the target", values))
        for when, energy in (("before", spectra.energy_before), ("after", spectra.energy_after)):
            assert energy is not None
            share = energy / energy.mean(-1, keepdims=True)
            title = f"{name}: log10 of energy {when} rotation, over the mean"
            panels.append(("channels", title, _rows(np.log10(np.maximum(share, 1e-6)))))
    key, value = artefact.calibration.key, artefact.calibration.value
    if key.widths is not None:
        widths = key.widths[_DRAWN_BITS - 1]
        panels.append(("widths", f"keys: block widths at {_DRAWN_BITS} bits", _rows(widths)))
    if not panels:
        for name, side in (("keys", key), ("values", value)):
            assert side.mean is not None
            panels.append(("channels", f"{name}: mean", _rows(side.mean)))
    return panels


def _rows(data: np.ndarray) -> np.ndarray:
    return data.reshape(-1, data.shape[-1])
