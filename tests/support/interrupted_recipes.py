"""Recipes on several replicas that are interrupted, or lose a process, and are gone on with.

`python interrupted_recipes.py mirrored|data_parallel FOLDER` interrupts a run in this process, goes on with it, and
runs it again without an interruption; prints as JSON which results are equal.

`python interrupted_recipes.py multi_worker FOLDER OUTPUT VICTIM [WORDS]` is a worker that calls `prunekit compress`;
the one of number VICTIM kills itself, once, in the middle of an epoch of the prune step.
"""

import json
import os
import re
import signal
import sys
import zipfile
from pathlib import Path

import h5py
import keras
import numpy as np
import yaml
from distributed_training import split_cpu

SCHEDULE = {"type": "linear", "final_sparsity": 0.8, "end": {"epochs": 2.5}, "frequency": 2}
# 70 examples in batches of 24 are three updates.
DEATH = 8


def write(folder, kind):
    """The path of a recipe whose model has what differs between replicas, and draws random numbers."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(70, 8)).astype("float32"), rng.integers(0, 4, 70)
    np.savez(folder / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    keras.utils.set_random_seed(6)
    layers = [
        keras.layers.Dense(16, "relu", name="hidden"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.3, name="drop"),
        keras.layers.Dense(4, name="logits"),
    ]
    keras.Sequential([keras.Input((8,)), *layers]).save(folder / "in.keras")
    recipe = {
        "version": 1,
        "name": "several",
        "distribute": kind,
        "model": {"file": str(folder / "in.keras")},
        "data": {"npz": str(folder / "d.npz")},
        "compile": {"optimizer": {"name": "adam", "learning_rate": 0.01}, "batch_size": 24, "from_logits": True},
        "steps": [
            {
                "prune": {
                    "epochs": 3,
                    "schedule": SCHEDULE,
                    **({} if kind == "data_parallel" else MOVEMENT),
                    "allocation": "uniform",
                }
            },
        ],
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


MOVEMENT = {"criterion": "movement"}


def ended(directory):
    """What a run directory holds that is the same in each run."""
    weights = {}

    def note(name, item):
        if isinstance(item, h5py.Dataset):
            weights[name] = np.asarray(item).tobytes()

    # The names of optimizers count on inside a process, so that the files are not the same.
    with zipfile.ZipFile(directory / "model.keras") as archive, archive.open("model.weights.h5") as member:
        h5py.File(member).visititems(note)
    report = json.loads((directory / "report.json").read_text())
    for step in report["steps"]:
        del step["seconds"]
    return weights, report


class Interrupt:
    """Interrupts a run once it has two epochs behind it."""

    def __call__(self, item):
        if item.epoch == 2:
            raise KeyboardInterrupt


def interrupted(kind, folder):
    from prunekit.recipe.run.runner import compress

    recipe = write(folder, kind)
    try:
        compress(recipe, output=folder / "run", progress=Interrupt())
    except KeyboardInterrupt:
        pass
    said = refused_on_three(recipe, folder)
    begun = sorted(path.name for path in (folder / "run.unfinished").glob("checkpoint-*"))
    compress(recipe, output=folder / "run", resume=True)
    compress(recipe, output=folder / "whole")
    same = [one == other for one, other in zip(ended(folder / "run"), ended(folder / "whole"), strict=True)]
    print(json.dumps({"begun": begun, "same": same, "said": said}))


def refused_on_three(recipe, folder):
    """What is said of a run that was begun on three replicas."""
    from prunekit.recipe.run.runner import compress

    path = folder / "run.unfinished" / "start.json"
    start = json.loads(path.read_text())
    path.write_text(json.dumps(start | {"versions": start["versions"] | {"replicas": 3}}))
    try:
        compress(recipe, output=folder / "run", resume=True)
    except ValueError as error:
        return str(error)
    finally:
        path.write_text(json.dumps(start))
    return "nothing"


def worker(folder, output, victim, *words):
    from prunekit.cli import main

    inner, counted, mark = keras.callbacks.CallbackList.on_train_batch_end, [], folder / "died"

    def end(self, *args, **kwargs):
        inner(self, *args, **kwargs)
        counted.append(None)
        index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        if len(counted) == DEATH and index == int(victim) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    keras.callbacks.CallbackList.on_train_batch_end = end
    main(["compress", str(folder / "recipe.yaml"), "-o", str(folder / output), *words])


def lines(output):
    """What a process printed, without what TensorFlow's libraries log."""
    return [line for line in output.splitlines() if not re.match(r"[IWE]\d{4} |WARNING: All log", line)]


if __name__ == "__main__":
    if sys.argv[1] == "multi_worker":
        worker(Path(sys.argv[2]), *sys.argv[3:])
    else:
        if sys.argv[1] == "mirrored":
            split_cpu(2)
        interrupted(sys.argv[1], Path(sys.argv[2]))
