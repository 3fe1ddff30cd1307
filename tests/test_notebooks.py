"""The notebooks under docs/ run as they are."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

DOCS = Path(__file__).parent.parent / "docs"
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))


def texts(notebook):
    """The printed text of each code cell."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(out.text for out in cell.outputs if out.get("name") == "stdout") for cell in cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.name for path in NOTEBOOKS])
def test_a_notebook_runs_and_shows_its_report(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    stored = texts(notebook)
    assert "[" in stored[1]
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    found = texts(notebook)
    # The sparsity of each epoch is exact; the accuracy depends on the machine.
    assert found[1] == stored[1] and "0 pruned weights are not zero" in found[2]
    outputs = [out.get("data", {}) for cell in notebook.cells for out in cell.get("outputs", ())]
    shown = [data["text/html"] for data in outputs if "text/html" in data]
    assert '<div class="prunekit">' in shown[0] and "dataframe" in shown[1]
