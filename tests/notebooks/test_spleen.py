"""The notebook: it is committed without outputs, and each of its cells runs."""

import os
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
PATH = Path(__file__).parents[2] / "notebooks" / "spleen.ipynb"


@pytest.fixture
def notebook() -> Any:
    return nbformat.read(PATH, as_version=4)


def test_it_is_valid_and_holds_no_outputs(notebook):
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert len(notebook.cells) > len(code) > 4  # it explains what it does
    assert "not for clinical use" in notebook.cells[0].source


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of Jupyter's packages are not ours
def test_it_runs_from_data_to_overlay(notebook, tmp_path, monkeypatch):
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("MEDSPEED_NOTEBOOK_QUICK", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PATH.parents[1]), os.environ.get("PYTHONPATH", "")]))
    client.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 3  # the curves, and a picture of each new scan
    links = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert any("report.html" in link for link in links)
    assert (tmp_path / "notebook-output" / "run" / "report.html").is_file()
    assert len(list((tmp_path / "notebook-output" / "masks").glob("*.nii.gz"))) == 2
