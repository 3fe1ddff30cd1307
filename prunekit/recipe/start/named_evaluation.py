"""Measures the model in a Keras or LiteRT file on data that the command line names."""

from dataclasses import asdict, dataclass
from typing import Any

import keras

from prunekit.core.outputs.output_metrics import OutputMetrics
from prunekit.delivery.litert.litert_model import LiteRTModel
from prunekit.recipe.datasets.data import measured_data
from prunekit.recipe.datasets.parts import Part
from prunekit.recipe.start.named_scan import compile_for, compiled_model
from prunekit.recipe.start.starting_recipe import is_folder_of_images, named_source
from prunekit.recipe.state.compile_settings import as_floats, reason_of
from prunekit.recipe.text.loader import RecipeError


@dataclass(frozen=True)
class Evaluation:
    """Loss and metrics of the model in a file.

    Attributes:
        path: The file.
        data: Name of the data.
        part: The part of the data that was used: "test part", "validation part" or "all examples".
        examples: Number of examples.
        metrics: Metric, or "loss" -> value.
        compiled: True if loss and metrics are those that the model was saved with; False if they were chosen by
            outputs and labels.
    """

    path: str
    data: str
    part: str
    examples: int
    metrics: dict[str, float]
    compiled: bool

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures as JSON values."""
        return asdict(self)


def evaluate_named(path: str, data: str, label: str | None, like: str | None, batch_size: int) -> Evaluation:
    """Returns loss and metrics of the model in a file.

    Args:
        path: A `.keras` or `.tflite` file.
        data: Name of built-in data, a CSV or npz file, or a folder, as `prunekit init` takes them.
        label: Column or part that holds the labels.
        like: The `.keras` file from which a LiteRT file was made: its loss and metrics are measured, and images are
            prepared for it.
        batch_size: Examples per batch.

    Raises:
        RecipeError: The model or the data cannot be read, or do not fit together.
    """
    named = path if path.endswith(".keras") else like
    original = None if named is None else compiled_model(named)
    file = None if path.endswith(".keras") else LiteRTModel(path)
    if original is None and is_folder_of_images(data):
        raise RecipeError(f"images are prepared as a Keras model needs them: name the one of {path} with --like.")
    subject: Any = file if original is None else original
    found, part = measured_data(named_source(data, label, subject))
    compiled = bool(subject.compiled)
    if not compiled:
        compile_for(subject, found)
    try:
        if original is not None and file is not None:
            metrics = _measured_like(original, file, found.test, batch_size)
        else:
            # LiteRT does not run inside a compiled function.
            subject.run_eagerly = subject.run_eagerly or file is not None
            arrays = found.test.evaluation_data(batch_size)
            metrics = as_floats(subject.evaluate(*arrays, batch_size=batch_size, verbose=0, return_dict=True))
    except RecipeError:
        raise
    except Exception as error:
        # Catch every exception: each backend has its own exception types for data that do not fit.
        raise RecipeError(f"{path} cannot be measured on {data}: {reason_of(error)}.") from error
    return Evaluation(path, data, part, found.test.examples, metrics, compiled)


def _measured_like(original: keras.Model, model: LiteRTModel, part: Part, batch_size: int) -> dict[str, float]:
    batches = [(inputs, labels, None) for inputs, labels in part.in_order(batch_size)]
    measured = OutputMetrics(original, batches)
    if measured.whole:
        raise RecipeError(f"the metrics of {original.name!r} need the Keras model: {measured.whole}. Leave out --like.")
    if len(keras.tree.flatten(original.outputs)) > 1:
        raise RecipeError("--like is for models with one output. Leave it out.")
    return measured(model(inputs) for inputs, _, _ in batches)
