"""Recipes for the perceptron of conftest.py, of which an epoch has five updates; their interruption and report."""

import numpy as np
import pytest
from backends import sync_model_state

from prunekit.anatomy.files.digests import weight_arrays
from prunekit.recipe.run.runner import compress
from prunekit.recipe.text.loader import RecipeError, load_recipe

SCHEDULE = {"type": "polynomial_decay", "final_sparsity": 0.8, "end": {"epochs": 1.5}, "frequency": 2}
COMPILE = {"optimizer": {"name": "adam", "learning_rate": 0.01}, "batch_size": 16, "from_logits": True}


# Its steps begin in line 6, column 5.
FILE = """\
version: 1
model: {builtin: digits-cnn}
data: {builtin: digits}
compile: {optimizer: adam}
steps:
  - STEP
"""


def mistake_in(step, folder):
    """The message that refuses a recipe file, r.yaml, with this step."""
    path = folder / "r.yaml"
    path.write_text(FILE.replace("STEP", step))
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    return str(caught.value)


def recipe(*steps, **others):
    return {"version": 1, "name": "tiny", "seed": 4, "compile": COMPILE, "steps": list(steps), **others}


def prune(epochs=2, **others):
    schedule = {**SCHEDULE, **others.pop("schedule", {})}
    return {"prune": {"epochs": epochs, "schedule": schedule, "allocation": "uniform", **others}}


def one_shot(sparsity, **others):
    """A step that prunes without a training and without a repair."""
    return {"prune": {"sparsity": sparsity, **others, "allocation": "uniform", "repair": "none"}}


ONE_SHOT = recipe(one_shot(0.5))
WHOLE = recipe(
    {"train": {"epochs": 1}},
    prune(exclude=["logits"]),
    {"finetune": {"epochs": 1, "learning_rate": 0.001}},
    {"export": {"formats": ["keras"]}},
    {
        "expect": {
            "metrics": {"accuracy": {"min": 0.0}},
            "sparsity": {"min": 0.8, "max": 0.8},
            "bytes": {"keras": {"max": 100_000}},
        }
    },
)


def zeros(model, name):
    sync_model_state(model)
    return int(np.sum(weight_arrays(model)[name] == 0))


class Stop:
    """Interrupts a run when so many ends of epochs, and of steps unless `steps` is False, were reported."""

    def __init__(self, ends, error=KeyboardInterrupt, *, steps=True):
        self.ends, self.error, self.steps = ends, error, steps

    def __call__(self, item):
        if item.epoch is not None or (self.steps and item.fraction == 1.0):
            self.ends -= 1
            if not self.ends:
                raise self.error


def resumed(steps, network, pairs, output, interrupt):
    """Returns the result of a run that is resumed after the progress function `interrupt` ended it."""
    with pytest.raises(KeyboardInterrupt):
        compress(steps, network(), pairs, output, progress=interrupt)
    return compress(steps, network(), pairs, output, resume=True)


def told(report):
    """A report without what takes its time."""
    values = report.to_dict()
    for step in values["steps"]:
        del step["seconds"]
    return values
