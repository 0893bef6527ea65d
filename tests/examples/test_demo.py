"""The notebook runs from top to bottom, here with a tiny random model."""

import math
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from jkvq.models.formats.converted_folder import write_converted
from tests.tiny import CONFIG

NOTEBOOK = Path(__file__).parents[2] / "examples/demo.ipynb"


def test_it_runs_and_shows_what_it_should(tiny, tmp_path):
    """One test, as two workers would each run the notebook for their own."""
    cells = _ran(tiny, tmp_path)
    _check_that_nothing_warned(cells)
    for name in ("memory", "kl", "speed"):
        _check_pictures(cells[name])
    _check_sizes_and_kl(cells)


def _ran(tiny, folder: Path) -> dict[str, nbformat.NotebookNode]:
    """Its cells by their names, with what they gave."""
    write_converted(folder / "tiny", CONFIG, tiny.params, tiny.tokenizer)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (knobs,) = [cell for cell in notebook.cells if cell.id == "device"]
    small = {"MODEL": str(folder / "tiny"), "CONTEXT": 512, "NEW": 8, "CALIBRATION": 512}
    for name, value in small.items():
        knobs.source, set_here = re.subn(
            rf"^{name} = .*", f"{name} = {value!r}", knobs.source, flags=re.M
        )
        assert set_here == 1
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return {cell.id: cell for cell in notebook.cells}


def _said(cell: nbformat.NotebookNode) -> str:
    return "".join(out.text for out in cell.outputs if out.output_type == "stream")


def _check_that_nothing_warned(cells: dict[str, nbformat.NotebookNode]) -> None:
    for cell in cells.values():
        for out in cell.get("outputs", []):
            assert out.output_type in ("stream", "display_data")
            assert out.get("name") != "stderr", out.text
    assert "runs on the CPU" in _said(cells["device"]) or "GPU kernels" in _said(cells["device"])


def _check_pictures(cell: nbformat.NotebookNode) -> None:
    """They are shown with finite figures beside them."""
    shown = [out.data for out in cell.outputs if out.output_type == "display_data"]
    (picture,) = [data["image/png"] for data in shown if "image/png" in data]  # not progress bars
    assert len(picture) > 5000
    lines = _said(cell).splitlines()
    assert len(lines) >= 2
    for line in lines:
        numbers = re.findall(r"(?<![\w-])\d[\d,.]*|nan|inf", line)
        assert numbers
        assert all(math.isfinite(float(n.replace(",", "").rstrip("."))) for n in numbers), line


def _check_sizes_and_kl(cells: dict[str, nbformat.NotebookNode]) -> None:
    """The small cache is small, and plain int2 is worse."""
    smaller = float(re.search(r"jkvq-int2: ([\d.]+) times", _said(cells["memory"]))[1])  # pyright: ignore
    assert smaller > 1.5
    kl = dict(re.findall(r"^(\S+): KL ([\d.]+)", _said(cells["kl"]), re.M))
    assert 0 == float(kl["bf16"]) < float(kl["jkvq-int2"]) < float(kl["int2"])


def test_no_outputs_are_kept_in_git():
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None
