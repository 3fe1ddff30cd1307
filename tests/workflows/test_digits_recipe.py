"""From the digits recipe to files that ship, in processes of their own, as a user runs it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from backends import BACKEND
from runnable_recipes import COMPRESS, FORMATS, runnable

pytestmark = pytest.mark.every_backend

VERIFY = """
import json, sys
from prunekit.recipe.run.runner import verify
print(json.dumps(verify(sys.argv[1]).to_dict()))
"""
# Nothing of prunekit can be imported here.
ELSEWHERE = """
import sys
sys.modules["prunekit"] = None
import keras, numpy as np
model = keras.models.load_model(sys.argv[1])
print([int(np.sum(model.get_layer(name).kernel.numpy() == 0)) for name in ("conv_1", "conv_2", "fc", "logits")])
"""


def figures_of_the_readme():
    """Returns kilobytes, latencies and accuracies, each before and after, from the README's first table."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    rows = [line.split("|") for line in readme.splitlines() if line.endswith("| scripts/demo |")]
    return [float(re.search(r"[\d.]+", cell)[0]) for row in rows for cell in row[2:4]]


def run(code, *arguments, cwd):
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.thorough
def test_the_digits_recipe_ends_faster_and_smaller_at_dense_accuracy_the_same_in_every_process(tmp_path):
    run(COMPRESS, runnable("digits", tmp_path), "run", cwd=tmp_path)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert all(row["met"] for row in report["expectations"])
    assert report["metrics"]["accuracy_after"] >= 0.98
    assert report["metrics"]["accuracy_before"] - report["metrics"]["accuracy_after"] <= 0.01
    # Half of 16 and 32 filters and of 64 units are left.
    exact = [round(0.8 * size) for size in (9 * 8, 9 * 8 * 16, 256 * 32)]
    assert [row["zeros"] for row in report["after"]["weights"] if row["name"] in report["after"]["targets"]] == exact
    exports = {row["format"]: row for row in report["exports"]}
    assert {row["status"] for row in exports.values()} == {"ok"}
    if BACKEND == "tensorflow":
        assert list(exports) == [*FORMATS, "litert-integer"]
        assert exports["litert-sparse"]["bytes"] < exports["litert"]["bytes"] / 2
        dense, smallest, _, _, *accuracies = figures_of_the_readme()
        before, *_ = report["stages"]
        files = {row["name"]: row for row in report["stages"] if row["kind"] == "file"}
        assert [before["bytes"] / 1000, files["litert-integer"]["bytes"] / 1000] == pytest.approx(
            [dense, smallest], rel=0.05
        )
        # Twice as fast where it was measured.
        assert before["latency"] > 1.2 * files["litert"]["latency"]
        # Another processor rounds sums differently: of 360 test images it may judge one or two otherwise.
        measured = [report["metrics"][f"accuracy_{when}"] for when in ("before", "after")]
        assert measured == pytest.approx(accuracies, abs=2.5 / 360)
    assert sum(step["seconds"] for step in report["steps"]) < 180
    assert json.loads(run(ELSEWHERE, "run/exports/model.keras", cwd=tmp_path)) == [*exact, 0]
    # Weights on the grids of the integer file: those that were not pruned may round to zero as well.
    assert json.loads(run(ELSEWHERE, "run/model.keras", cwd=tmp_path))[:-1] == exact
    outcome = json.loads(run(VERIFY, "run", cwd=tmp_path))
    assert outcome == {"identical": True, "differences": [], "directory": "run"}
