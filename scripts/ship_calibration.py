"""Makes the calibration of a catalogue model that ships with the package.

    python -m scripts.ship_calibration smollm2-135m

Rotations are stored in float16, which is what kernels take. Nothing of it is kept where the weights
differ: a model of the same name with others is calibrated on its first use.
"""

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from jkvq.cache.calibrated import SideCalibration
from jkvq.calibration.artefact import save_artefact
from jkvq.loading.calibrate import calibrate

SHIPPED = Path(__file__).parents[1] / "calibration" / "shipped"


def main(
    model: str,
    method: str = "jkvq",
    tokens: Annotated[int, typer.Option(help="Of the default text.")] = 8192,
):
    """Writes calibration/shipped/MODEL/METHOD."""
    with tempfile.TemporaryDirectory() as work:
        found = calibrate(model, method=method, tokens=tokens, out=Path(work) / "made")
    sides = {name: _narrow(getattr(found.calibration, name)) for name in ("key", "value")}
    narrow = dataclasses.replace(found.calibration, **sides)
    folder = SHIPPED / model / method
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
