"""What tests kill and start again: a recipe, and a script of a user's. No TensorFlow runs before a job does."""

import json

import keras
import numpy as np
from networks import sequential

import prunekit as pk
from prunekit import cli
from prunekit.recipe.run import runner  # noqa: F401 (imported before processes are forked)

RECIPE = {
    "version": 1,
    "name": "killed",
    "seed": 5,
    "compile": {
        "optimizer": {"name": "adam", "learning_rate": 0.01, "arguments": {"use_ema": True}},
        "batch_size": 16,
        "from_logits": True,
    },
    "steps": [
        {"train": {"epochs": 2}},
        {
            "prune": {
                "epochs": 4,
                "criterion": "movement",
                "schedule": {
                    "type": "polynomial_decay",
                    "final_sparsity": 0.8,
                    "begin": {"steps": 2},
                    "end": {"epochs": 3},
                    "frequency": 3,
                },
                "allocation": "uniform",
            }
        },
        {"export": {"formats": ["keras"], "name": "pruned"}},
        {"finetune": {"epochs": 2, "learning_rate": 0.001}},
        {"export": {"formats": ["keras"]}},
        {"expect": {"sparsity": {"min": 0.7}}},
    ],
}


IN_ROUNDS = {"number": 2, "sparsity": 0.8, "epochs_per_round": 2}


def model():
    layers = keras.layers
    return sequential(
        (8,),
        layers.Dense(16, activation="relu", name="hidden"),
        layers.BatchNormalization(name="norm"),
        layers.Dropout(0.3, name="dropout"),
        layers.Dense(4, name="logits"),
    )


def samples():
    rng = np.random.default_rng(3)
    return rng.normal(size=(70, 8)).astype("float32"), rng.integers(0, 4, 70)


def recipe(folder):
    """By the command line, from the files that `write` wrote beside the folder."""
    code = cli.run(["compress", str(folder.parent / "inputs" / "recipe.yaml"), "-o", str(folder / "run"), "--resume"])
    if code:
        raise RuntimeError(f"exit code {code}")


def write(inputs, steps=RECIPE["steps"]):
    """Recipe, model and data, as files."""
    inputs.mkdir()
    keras.utils.set_random_seed(1)
    model().save(inputs / "in.keras")
    x, y = samples()
    np.savez(inputs / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    files = {"model": {"file": str(inputs / "in.keras")}, "data": {"npz": str(inputs / "d.npz")}}
    (inputs / "recipe.yaml").write_text(json.dumps(RECIPE | files | {"steps": steps}))


def scan(folder):
    """A sensitivity scan by the command line, of the model and the data that `write` wrote beside the folder."""
    inputs = folder.parent / "inputs"
    arguments = [
        "sensitivity",
        inputs / "in.keras",
        "--data",
        inputs / "d.npz",
        "-o",
        folder / "scan",
        "--memory",
        "1MB",
    ]
    code = cli.run([*map(str, arguments), "--include", "*"])
    if code:
        raise RuntimeError(f"exit code {code}")


def script(folder):
    keras.utils.set_random_seed(1)
    network = model()
    network.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    schedule = pk.schedules.PolynomialDecay(final_sparsity=0.8, begin_step=2, end_step=20, frequency=3)
    pruning = pk.PruningCallback(schedule, criterion="movement", allocation="uniform")
    backup = keras.callbacks.BackupAndRestore(folder / "backup")
    network.fit(*samples(), batch_size=16, epochs=6, shuffle=False, verbose=0, callbacks=[backup, pruning])
    np.savez(folder / "end.npz", *[variable.numpy() for variable in [*network.variables, *network.optimizer.variables]])
