"""RunInputs: the model, the data and the settings of a run, as every step is prepared and run with them."""

import contextlib
from dataclasses import dataclass

import keras

from prunekit.anatomy.cost.inspection import SparsityReport, inspect
from prunekit.delivery.reports.metrics import Metric
from prunekit.recipe.datasets.data import Data
from prunekit.recipe.settings.compile_fields import Compile
from prunekit.recipe.settings.schema import Recipe
from prunekit.recipe.state.replicas import ALONE, Replicas


@dataclass(frozen=True, eq=False)
class RunInputs:
    """Model, data and settings of a run.

    Attributes:
        recipe: Recipe, with the path of a model file given by the caller written into it.
        model: Built model with its initial weights; while later steps are prepared, perhaps the stand-in for a model
            that an earlier step will return.
        data: Data of the run; None if neither the caller nor the recipe gives data.
        compile: Compile settings for training and evaluation; None if neither the recipe has them nor data exist.
        steps_per_epoch: Optimizer updates per epoch; None without data.
        replicas: Replicas on which the model is built.
        metrics: The metrics that the settings name, and the loss, the main one first; () without data.
    """

    recipe: Recipe
    model: keras.Model
    data: Data | None
    compile: Compile | None
    steps_per_epoch: int | None
    replicas: Replicas = ALONE
    metrics: tuple[Metric, ...] = ()


def inspected(model: keras.Model, data: Data | None) -> SparsityReport:
    """Returns the report on a model's weights; an example of the data gives the sizes that the model leaves open."""
    if data is not None:
        # A model that cannot be traced on the example is traced on its declared inputs, and a note gives the reason.
        with contextlib.suppress(ValueError, TypeError):
            return inspect(model, inputs=data.train.example[0])
    return inspect(model)
