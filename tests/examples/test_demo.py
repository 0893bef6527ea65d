"""The notebook runs from top to bottom, here with a tiny random model."""

import math
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from jkvq.models.formats.converted_folder import write_converted
from tests.tiny import CONFIG

NOTEBOOK = Path(__file__).parents[2] / "examples/demo.ipynb"


@pytest.fixture(scope="module")
def ran(tiny, tmp_path_factory) -> dict[str, nbformat.NotebookNode]:
    """Its cells by their names, with what they gave."""
    folder = tmp_path_factory.mktemp("demo")
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


def test_every_cell_ran_without_warnings(ran):
    for cell in ran.values():
        for out in cell.get("outputs", []):
            assert out.output_type in ("stream", "display_data")
            assert out.get("name") != "stderr", out.text
    assert "runs on the CPU" in _said(ran["device"]) or "GPU kernels" in _said(ran["device"])


@pytest.mark.parametrize("name", ["memory", "kl", "speed"])
def test_pictures_are_shown_with_finite_figures_beside_them(ran, name):
    shown = [out.data for out in ran[name].outputs if out.output_type == "display_data"]
    (picture,) = [data["image/png"] for data in shown if "image/png" in data]  # not progress bars
    assert len(picture) > 5000
    lines = _said(ran[name]).splitlines()
    assert len(lines) >= 2
    for line in lines:
        numbers = re.findall(r"(?<![\w-])\d[\d,.]*|nan|inf", line)
        assert numbers
        assert all(math.isfinite(float(n.replace(",", "").rstrip("."))) for n in numbers), line


def test_the_small_cache_is_small_and_plain_int2_is_worse(ran):
    smaller = float(re.search(r"jkvq-int2: ([\d.]+) times", _said(ran["memory"]))[1])  # pyright: ignore
    assert smaller > 1.5
    kl = dict(re.findall(r"^(\S+): KL ([\d.]+)", _said(ran["kl"]), re.M))
    assert 0 == float(kl["bf16"]) < float(kl["jkvq-int2"]) < float(kl["int2"])


def test_no_outputs_are_kept_in_git():
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None
