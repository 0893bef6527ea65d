"""Puts a calibration of a catalogue model into the package, with which it ships.

    jkvq calibrate --model smollm2-135m --learn --text train.raw.gz --out learned
    python -m scripts.ship_calibration learned

Rotations are stored in float16, which is what kernels take. Nothing of it is kept where the weights
differ: a model of the same name with others is calibrated on its first use.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from jkvq.cache.calibrated import SideCalibration
from jkvq.calibration.artefact import load_artefact, save_artefact

SHIPPED = Path(__file__).parents[1] / "calibration" / "shipped"


def main(calibration: Annotated[Path, typer.Argument(help="What `jkvq calibrate` wrote.")]):
    """Writes calibration/shipped/MODEL/METHOD."""
    found = load_artefact(calibration)
    sides = {name: _narrow(getattr(found.calibration, name)) for name in ("key", "value")}
    narrow = dataclasses.replace(found.calibration, **sides)
    folder = SHIPPED / found.manifest.model / found.manifest.method
    shutil.rmtree(folder, ignore_errors=True)
    save_artefact(dataclasses.replace(found, calibration=narrow), folder)
    print(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir()):,} bytes")


def _narrow(side: SideCalibration) -> SideCalibration:
    def narrow(transform):
        rotation = transform.rotation
        return dataclasses.replace(
            transform, rotation=None if rotation is None else rotation.astype(np.float16)
        )

    return dataclasses.replace(
        side, all_tokens=narrow(side.all_tokens), past_windows=narrow(side.past_windows)
    )


if __name__ == "__main__":
    typer.run(main)
