"""Recipes that come with prunekit, run as a user runs them; and a run that ends early."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from runnable_recipes import COMPRESS, runnable

from prunekit.anatomy.files.digests import model_digest, weight_arrays
from prunekit.recipe.datasets.data import check_files, load_data
from prunekit.recipe.run.runner import compress, plan
from prunekit.recipe.state.models import build_model, load_model
from prunekit.recipe.text.loader import RecipeError, load_recipe

pytestmark = pytest.mark.every_backend

LONG = """
version: 1
name: long
model: {builtin: digits-cnn}
data: {builtin: digits, limit: 200}
compile: {optimizer: adam}
steps: [{train: {epochs: 100000}}]
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGINT, id="interrupted"),
    ],
)
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
    once = {"version": 1, "steps": [{"prune": {"sparsity": 0.5, "allocation": "uniform", "repair": "none"}}]}
    compress(once, digits(tmp_path), output=tmp_path / "run", force=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["long.yaml", "model.keras", "run"]


def digits(folder: Path) -> str:
    model = build_model(load_recipe("digits").model, seed=0)
    model.save(folder / "model.keras")
    return str(folder / "model.keras")


@pytest.mark.thorough
def test_the_one_shot_recipe_prunes_a_model_file_without_touching_it(tmp_path):
    path = digits(tmp_path)
    before = Path(path).read_bytes()
    result = compress(runnable("one-shot", tmp_path), path, output=tmp_path / "run", overrides={"sparsity": 0.75})
    assert Path(path).read_bytes() == before
    arrays = weight_arrays(load_model(tmp_path / "run" / "model.keras"))
    pruned = [arrays[name] for name in result.report.after.targets]
    assert sum(np.count_nonzero(one == 0) for one in pruned) == round(0.75 * sum(one.size for one in pruned))
    assert {row.status for row in result.report.exports} == {"ok"}
    assert result.report.hashes["weights"] == model_digest(result.model) != result.report.hashes["model"]


@pytest.mark.parametrize(
    ("name", "final"),
    [("fashion-mlp", 0.9), ("fashion-cnn", 0.9), ("fashion-mlp-98", 0.98), ("fashion-cnn-95", 0.95)],
)
@pytest.mark.every_backend(cases=0)
def test_the_fashion_recipes_can_be_run_with_the_data_of_this_machine(name, final, tmp_path):
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
    sizes = [target.size for target in pruning.targets]
    assert sum(target.pruned for target in pruning.targets) == round(final * sum(sizes))
    assert pruning.pruning[-1][1] == final
