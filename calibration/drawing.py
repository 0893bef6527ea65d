"""An artefact as a picture."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from jaxtyping import Float, Shaped

from jkvq.calibration.artefact import Artefact
from jkvq.support.pictures import SEQUENTIAL, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DRAWN_BITS = (2, 3)  # the budgets whose allocations are drawn
_LAYER_MARKS = 10  # at most so many layers have a label on an axis
_FLAT = 1.05  # a map whose values differ by less than this factor is said to be flat


class _Panel(Protocol):
    def draw(self, axes: "Axes") -> None: ...


def draw(artefact: Artefact) -> "Figure":
    """Spectra and channel energies before and after rotation, or widths, or means."""
    rows = _spectra(artefact) or _widths(artefact) or _means(artefact)
    manifest = artefact.manifest
    figure = new_figure(
        *(5.5 * len(rows[0]), 4.2 * len(rows) + 0.5),
        f"Calibration of {manifest.model}: method {manifest.method}, {manifest.tokens:,} tokens of "
        f"{manifest.corpus}",
    )
    grid = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for axes, panel in zip(grid.flat, (panel for row in rows for panel in row), strict=True):
        panel.draw(axes)
    return figure


@dataclass(frozen=True)
class _Spectrum:
    """Eigenvalues over their rank, a line for each layer, coloured by its number."""

    title: str
    eigenvalues: Float[np.ndarray, "L H"]

    def draw(self, axes: "Axes") -> None:
        from matplotlib import colormaps  # noqa: PLC0415 (takes a second)
        from matplotlib.cm import ScalarMappable  # noqa: PLC0415
        from matplotlib.colors import Normalize  # noqa: PLC0415

        shade = ScalarMappable(Normalize(0, len(self.eigenvalues) - 1), colormaps["cividis"])
        for layer, line in enumerate(self.eigenvalues):
            axes.plot(line, color=shade.to_rgba(layer), linewidth=0.9)
        axes.set_yscale("log")
        axes.set_title(self.title, fontsize="medium")
        axes.set_xlabel("direction, largest first")
        axes.set_ylabel("eigenvalue, mean over heads")
        axes.figure.colorbar(shade, ax=axes, label="layer")


@dataclass(frozen=True)
class _HeadMap:
    """A row of cells for each head, layer under layer.

    colours: what `imshow` takes to colour the cells.
    """

    title: str
    cells: Shaped[np.ndarray, "L K columns"]
    across: str
    unit: str
    colours: dict[str, Any]
    note: str | None = None  # written over the map

    def draw(self, axes: "Axes") -> None:
        layers, heads, columns = self.cells.shape
        rows = self.cells.reshape(layers * heads, columns)
        image = axes.imshow(rows, aspect="auto", interpolation="nearest", **self.colours)
        axes.set_title(self.title, fontsize="medium")
        axes.set_xlabel(self.across)
        axes.set_ylabel(f"layer ({heads} KV head{'s' if heads > 1 else ''} each)")
        marked = range(0, layers, -(-layers // _LAYER_MARKS))
        axes.set_yticks([layer * heads - 0.5 for layer in marked], [str(i) for i in marked])
        axes.figure.colorbar(image, ax=axes, label=self.unit)
        if self.note:
            axes.text(
                *(0.5, 0.5, self.note),
                **{"transform": axes.transAxes, "ha": "center", "va": "center"},
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85},
            )


def _spectra(artefact: Artefact) -> list[list[_Panel]]:
    from matplotlib.colors import LogNorm  # noqa: PLC0415 (takes a second)

    rows = []
    for name, spectra in (("keys", artefact.key), ("values", artefact.value)):
        if spectra.eigenvalues is None:
            continue
        assert spectra.energy_before is not None
        assert spectra.energy_after is not None
        before, after = (
            np.maximum(energy / energy.mean(-1, keepdims=True), 1e-4)
            for energy in (spectra.energy_before, spectra.energy_after)
        )
        limits = float(min(before.min(), 1 / _FLAT)), float(max(before.max(), _FLAT))
        row: list[_Panel] = [
            _Spectrum(
                f"{name}: what the rotation is made from\n(steep: few directions matter)",
                np.maximum(spectra.eigenvalues.mean(1), 1e-12),
            )
        ]
        for when, energy in (("before", before), ("after", after)):
            flat = energy.max() < _FLAT * energy.min()
            row.append(
                _HeadMap(
                    f"{name} {when} rotation: strongest channel {energy.max(-1).mean():.1f} x the "
                    "mean\n(lower is better; 1.0 is even)",
                    energy,
                    "channel",
                    "energy of the channel / mean of its head",
                    {"norm": LogNorm(*limits), "cmap": SEQUENTIAL},
                    note="flat: all channels have the same energy" if flat else None,
                )
            )
        rows.append(row)
    return rows


def _widths(artefact: Artefact) -> list[list[_Panel]]:
    from matplotlib import colormaps  # noqa: PLC0415 (takes a second)

    widths = artefact.calibration.key.widths
    if widths is None:
        return []
    colours = {"vmin": 0.5, "vmax": 8.5, "cmap": colormaps[SEQUENTIAL].resampled(8)}
    return [
        [
            _HeadMap(
                f"keys: bits of each rotary block, {bits} on average\n"
                "(more bits where an error costs more)",
                widths[bits - 1],
                "rotary block, fastest first",
                "bits per channel",
                colours,
            )
            for bits in _DRAWN_BITS
        ]
    ]


def _means(artefact: Artefact) -> list[list[_Panel]]:
    calibration = artefact.calibration
    row: list[_Panel] = []
    for name, side in (("keys", calibration.key), ("values", calibration.value)):
        mean = side.all_tokens.mean
        if mean is not None:
            most = max(float(np.abs(mean).max()), 1e-6)
            colours = {"vmin": -most, "vmax": most, "cmap": "PuOr"}
            title = f"{name}: mean that is subtracted before coding\n(far from 0: a constant part)"
            row.append(_HeadMap(title, mean, "channel", "mean over tokens", colours))
    return [row]
