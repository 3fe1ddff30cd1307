"""The notebooks under docs/ run as they are, and their stored outputs are those of a run."""

import json
import re

import nbformat
import pytest
from executed_notebooks import NOTEBOOKS, code_cells, executed

# Folders of a machine, and addresses of objects in its memory.
OF_A_MACHINE = re.compile(r"/(?:home|root|tmp|work|usr|opt|mnt|Users|var)/|site-packages|\b0x[0-9a-f]{8}|[A-Z]:\\\\")


def texts(notebook):
    """The printed text of each code cell."""
    return ["".join(out.text for out in cell.outputs if out.get("name") == "stdout") for cell in code_cells(notebook)]


def shown(notebook, kind):
    """What the cells show as one kind, such as "text/html"."""
    outputs = [out.get("data", {}) for cell in code_cells(notebook) for out in cell.outputs]
    return [data[kind] for data in outputs if kind in data]


def test_there_is_a_notebook_for_a_first_model():
    assert "first-pruned-model.ipynb" in [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.name for path in NOTEBOOKS])
def test_stored_outputs_are_of_one_run_in_order_and_name_no_machine(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert [
        out for cell in cells for out in cell.outputs if out.output_type == "error" or out.get("name") == "stderr"
    ] == []
    assert OF_A_MACHINE.findall(path.read_text()) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.name for path in NOTEBOOKS])
def test_a_notebook_runs_and_shows_its_report(path, tmp_path):
    stored = nbformat.read(path, as_version=4)
    notebook = executed(path, tmp_path)
    found = texts(notebook)
    # The sparsity of each epoch is exact; the accuracy depends on the machine.
    assert found[1] == texts(stored)[1] and json.loads(found[1])[-1] == 0.9
    assert "0 pruned weights are not zero" in found[2]
    report, frame = shown(notebook, "text/html")
    # With the style: a stored output of an older version would look different in Jupyter.
    assert report == shown(stored, "text/html")[0] and "dataframe" in frame
    # 7373 of 8192 weights of the file, after the fit with KeepZeros.
    assert shown(notebook, "text/plain")[-1] == shown(stored, "text/plain")[-1] == f"np.float64({7373 / 8192})"
