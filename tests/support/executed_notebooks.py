"""Runs the notebooks under docs/; as a program, stores their outputs (scripts/notebooks)."""

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs").rglob("*.ipynb"))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def executed(path, folder):
    """Returns the notebook after a run in `folder`, without what was written to standard error."""
    notebook = nbformat.read(path, as_version=4)
    for cell in code_cells(notebook):
        cell.outputs = []
    metadata = dict(notebook.metadata)
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder)}}).execute()
    # The run adds its times and the version of Python.
    notebook.metadata = nbformat.from_dict(metadata)
    for cell in code_cells(notebook):
        cell.metadata.pop("execution", None)
        cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    return notebook


if __name__ == "__main__":
    for found in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as scratch:
            nbformat.write(executed(found, scratch), found)
        print(found.name)
