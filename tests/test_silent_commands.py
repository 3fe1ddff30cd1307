"""The command line: missing files in `check`, `--set` in `--resume`, and `report` without TensorFlow."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import yaml
from run_reports import make
from tiny_recipes import COMPILE

from prunekit.recipe.run.runner import compress

HEAVY = ("tensorflow", "keras", "jax", "torch", "matplotlib")
RECIPE = """
version: 1
name: files
model: {file: in.keras}
data: {npz: data/d.npz}
compile: {optimizer: sgd, loss: sparse_categorical_crossentropy}
steps: [train: {epochs: 1}]
"""


def test_check_names_every_missing_file_and_fails(run, tmp_path):
    (tmp_path / "r.yaml").write_text(RECIPE)
    code, out, err = run("check", "r.yaml")
    assert (code, out) == (2, "")
    assert err.startswith("error: r.yaml:4:15: expected the files that the recipe names. Received none at model.file: ")
    assert f"model.file: {tmp_path / 'in.keras'}; data.npz: {tmp_path / 'data' / 'd.npz'}. Put them there" in err
    code, out, _ = run("check", "r.yaml", "--json")
    assert code == 2 and json.loads(out)["ok"] is False and "data.npz" in json.loads(out)["error"]["message"]


def test_check_names_missing_folders_of_data(run, tmp_path):
    text = RECIPE.replace("{npz: data/d.npz}", "{images: photos, size: [9, 9], test: others}")
    (tmp_path / "r.yaml").write_text(text)
    code, _, err = run("check", "r.yaml")
    assert code == 2 and f"data.images: {tmp_path / 'photos'}; data.test: {tmp_path / 'others'}. Put them there" in err


def test_check_is_content_once_they_are_there(run, tmp_path):
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "data").mkdir()
    for name in ("in.keras", "data/d.npz"):
        (tmp_path / name).write_bytes(b"")
    assert run("check", "r.yaml")[0] == 0


@pytest.mark.parametrize("kind", ["idx", "npy"])
def test_check_looks_for_each_of_four_arrays_and_for_a_folder(run, tmp_path, kind):
    parts = ("train_inputs", "train_labels", "test_inputs", "test_labels")
    names = ", ".join(f"{part}: {part}.bin" for part in parts)
    for part in parts[:2]:
        (tmp_path / f"{part}.bin").write_bytes(b"")
    (tmp_path / "r.yaml").write_text(RECIPE.replace("npz: data/d.npz", f"{kind}: {{{names}}}"))
    err = run("check", "r.yaml")[2]
    assert f"data.{kind}.test_inputs" in err and f"data.{kind}.test_labels" in err and "train_" not in err
    (tmp_path / "r.yaml").write_text(RECIPE.replace("npz: data/d.npz", "builtin: fashion-mnist, path: nowhere"))
    assert "data.path: " in run("check", "r.yaml")[2]


@pytest.fixture
def stopped(perceptron, pairs, tmp_path):
    """A recipe with variables, and an unfinished run of it with other values than it declares."""
    (x, y), _ = pairs
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    perceptron.save(tmp_path / "in.keras")
    document = {
        "version": 1,
        "variables": {"rate": 0.1, "epochs": 2, "seed": 3},
        "model": {"file": "in.keras"},
        "data": {"npz": "d.npz"},
        "compile": COMPILE,
        "seed": "$seed",
        "steps": [{"train": {"epochs": "$epochs", "learning_rate": "$rate"}}],
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(document))

    def stop(progress):
        if progress.epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(tmp_path / "r.yaml", output=tmp_path / "run", overrides={"rate": 0.2, "epochs": 3}, progress=stop)
    return tmp_path


def test_resume_without_the_first_runs_values_says_what_to_set(stopped, run):
    code, _, err = run("compress", "r.yaml", "-o", "run", "--resume")
    assert code == 2 and err.count("\n") == 1
    assert "variables of the recipe have other values (epochs: 3 before, 2 now, rate: 0.2 before, 0.1 now)" in err
    assert "resume with --set epochs=3 --set rate=0.2 (overrides={'epochs': 3, 'rate': 0.2}). Undo these changes" in err
    assert run("compress", "r.yaml", "-o", "run", "--resume", "--set", "rate=0.2", "--set", "epochs=3")[0] == 0
    assert keras.models.load_model(stopped / "run" / "model.keras").built


def test_the_report_of_a_stored_run_is_shown_without_tensorflow(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.json").write_text(json.dumps(make().to_dict()))
    code = (
        "import sys; from prunekit.cli import run; code = run(['report', 'run'])\n"
        f"print('HEAVY', code, [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ), timeout=120
    )
    assert done.stdout.endswith("HEAVY 0 []\n"), done.stdout + done.stderr
    assert make().title in done.stdout
