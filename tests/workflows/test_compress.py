"""From a recipe to files that ship, in processes of their own, as a user runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from backends import BACKEND

from prunekit.recipe.data import check_files, load_data
from prunekit.recipe.loader import RecipeError, load_recipe
from prunekit.recipe.models import build_model, load_model, model_digest, weight_arrays
from prunekit.recipe.runner import compress, plan

pytestmark = pytest.mark.every_backend

RECIPES = Path(__file__).parents[2] / "recipes"
FORMATS = ["keras", "litert", "litert-sparse", "litert-float16", "litert-dynamic-int8"]
COMPRESS = """
import sys
from prunekit.recipe.runner import compress
compress(sys.argv[1], output=sys.argv[2], force=True)
"""
VERIFY = """
import json, sys
from prunekit.recipe.runner import verify
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
LONG = """
version: 1
name: long
model: {builtin: digits-cnn}
data: {builtin: digits, limit: 200}
compile: {optimizer: adam}
steps: [{train: {epochs: 100000}}]
"""


def run(code, *arguments, cwd):
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def runnable(name: str, folder: Path) -> str:
    """The recipe as it comes; where Keras has no TensorFlow, a copy of it without what needs TensorFlow."""
    if BACKEND == "tensorflow":
        return name
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    for step in recipe["steps"]:
        if "export" in step:
            assert step["export"]["formats"] == FORMATS
            step["export"]["formats"] = ["keras"]
        step.get("expect", {}).pop("bytes", None)
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return str(folder / f"{name}.yaml")


@pytest.mark.slow
def test_the_digits_recipe_prunes_to_90_percent_at_dense_accuracy_the_same_in_every_process(tmp_path):
    run(COMPRESS, runnable("digits", tmp_path), "run", cwd=tmp_path)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert all(row["met"] for row in report["expectations"])
    assert report["metrics"]["accuracy_after"] >= 0.98
    assert report["metrics"]["accuracy_before"] - report["metrics"]["accuracy_after"] <= 0.01
    exact = [round(0.9 * size) for size in (144, 4608, 32768)]
    assert [row["zeros"] for row in report["after"]["weights"] if row["name"] in report["after"]["targets"]] == exact
    exports = {row["format"]: row for row in report["exports"]}
    assert {row["status"] for row in exports.values()} == {"ok"}
    if BACKEND == "tensorflow":
        assert list(exports) == FORMATS
        assert exports["litert-sparse"]["bytes"] < exports["litert"]["bytes"] / 4
    assert sum(step["seconds"] for step in report["steps"]) < 180
    assert json.loads(run(ELSEWHERE, "run/model.keras", cwd=tmp_path)) == [*exact, 0]
    outcome = json.loads(run(VERIFY, "run", cwd=tmp_path))
    assert outcome == {"identical": True, "differences": [], "directory": "run"}


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_run_that_ends_early_never_looks_finished_and_the_next_one_clears_up(tmp_path, how):
    (tmp_path / "long.yaml").write_text(LONG)
    # A shell that starts this in the background has it, and its children, ignore interrupts.
    heeding = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{COMPRESS}"
    command = [sys.executable, "-c", heeding, "long.yaml", "run"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + 120
            # While a model is built, Keras on PyTorch takes an interrupt for a layer that has no meta tensors.
            while not list(tmp_path.glob("run.unfinished/checkpoint-*")) and time.monotonic() < until:
                assert process.poll() is None, "the run ended by itself"
                time.sleep(0.1)
            os.kill(process.pid, how)
            process.wait(60)
        finally:
            process.kill()
    assert process.returncode != 0 and not (tmp_path / "run").exists()
    once = {"version": 1, "steps": [{"prune": {"sparsity": 0.5}}]}
    compress(once, digits(tmp_path), output=tmp_path / "run", force=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["long.yaml", "model.keras", "run"]


def digits(folder: Path) -> str:
    model = build_model(load_recipe("digits").model, seed=0)
    model.save(folder / "model.keras")
    return str(folder / "model.keras")


def test_the_one_shot_recipe_prunes_a_model_file_without_touching_it(tmp_path):
    path = digits(tmp_path)
    before = Path(path).read_bytes()
    result = compress(runnable("one-shot", tmp_path), path, output=tmp_path / "run", overrides={"sparsity": 0.75})
    assert Path(path).read_bytes() == before
    arrays = weight_arrays(load_model(tmp_path / "run" / "model.keras"))
    for name in result.report.after.targets:
        assert np.count_nonzero(arrays[name] == 0) == round(0.75 * arrays[name].size)
    assert {row.status for row in result.report.exports} == {"ok"}
    assert result.report.hashes["weights"] == model_digest(result.model) != result.report.hashes["model"]


@pytest.mark.parametrize("name", ["fashion-mlp", "fashion-cnn"])
def test_the_fashion_recipes_can_be_run_with_the_data_of_this_machine(name, tmp_path):
    recipe = load_recipe(name)
    try:
        check_files(recipe.data)
    except RecipeError as error:
        pytest.skip(str(error))
    data = load_data(recipe.data, recipe.seed)
    assert data.train[0].shape == (60_000, 28, 28, 1) and data.test[0].shape == (10_000, 28, 28, 1)
    assert np.bincount(data.train[1]).tolist() == [6_000] * 10 and data.train[0].max() == 1.0
    small = {part: tuple(array[:512] for array in getattr(data, part)) for part in ("train", "test")}
    found = plan(runnable(name, tmp_path), data=(small["train"], small["test"]))
    (pruning,) = [step for step in found.steps if step.kind == "prune"]
    assert all(target.pruned == round(0.9 * target.size) for target in pruning.targets)
    assert pruning.pruning[-1][1] == 0.9
