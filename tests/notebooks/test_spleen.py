"""The notebook is committed without outputs; tests/journeys/10_notebook.sh runs it."""

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
