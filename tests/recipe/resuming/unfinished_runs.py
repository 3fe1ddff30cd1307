"""A small run that is interrupted, and what is on disk of it."""

import keras
import pytest
from backends import BACKEND
from tiny_recipes import Stop, one_shot

from prunekit.recipe.run.runner import compress

# Of the criteria, the one with statistics of its own, where there is one.
CRITERION = "movement" if BACKEND == "tensorflow" else "magnitude"
SCHEDULE = {"type": "polynomial_decay", "final_sparsity": 0.8, "end": {"epochs": 2}, "frequency": 2}
WHOLE = {
    "version": 1,
    "name": "tiny",
    "seed": 4,
    "compile": {"optimizer": {"name": "adam", "learning_rate": 0.01}, "batch_size": 16, "from_logits": True},
    "steps": [
        {"train": {"epochs": 2}},
        {"export": {"formats": ["keras"], "name": "dense"}},
        {"prune": {"epochs": 3, "schedule": SCHEDULE, "criterion": CRITERION, "allocation": "uniform"}},
        one_shot(0.9, include=["hidden"]),
        {"finetune": {"epochs": 1}},
        {"export": {"formats": ["keras"]}},
    ],
}


def network():
    keras.utils.set_random_seed(20)
    layers = [
        keras.layers.Dense(16, name="hidden"),
        keras.layers.Dropout(0.3, name="drop"),
        keras.layers.Dense(4, name="logits"),
    ]
    return keras.Sequential([keras.Input((8,), name="features"), *layers], name="tiny")


def interrupted(pairs, path, ends=5, recipe=WHOLE, error=KeyboardInterrupt, **options):
    with pytest.raises(error):
        compress(recipe, network(), pairs, path, progress=Stop(ends, error), **options)
    return path.with_name(f"{path.name}.unfinished")


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())
