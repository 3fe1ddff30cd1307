"""The test examples on which exported files are compared, measured and timed."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from prunekit.core.data.synthetic_inputs import comparison_inputs
from prunekit.operations.quantize import outputs_of
from prunekit.recipe.datasets.data import Data
from prunekit.recipe.datasets.parts import flat, mapped
from prunekit.recipe.state.compile_settings import OutputMetrics, output_names
from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.text.loader import RecipeError

# Test examples on which files are compared and measured: as many as fit into so many bytes, within these bounds.
_FEWEST, _MOST, _BYTES = 500, 2000, 64_000_000


def sample_count(data: Data) -> int:
    """Returns the number of test examples on which files are compared and measured."""
    size = sum(array.nbytes for array in flat(data.test.example[0]))
    return min(data.test.examples, max(_FEWEST, min(_MOST, _BYTES // max(1, size))))


def measures_all(data: Data | None) -> bool:
    """Returns True if exported files are measured on all test examples, or on none."""
    return data is None or sample_count(data) == data.test.examples


def measure_of_outputs(run: RunInputs, model: keras.Model) -> Callable[[list[np.ndarray]], dict[str, float]] | None:
    """Returns the function that measures outputs for the first `sample_count` test examples; None without data."""
    if run.data is None or run.compile is None:
        return None
    outputs = model(run.data.test.example[0], training=False)
    names = output_names(model, outputs)
    # Outputs of a file are in the order in which Keras flattens the model's outputs; mappings are sorted by name.
    order = tuple(sorted(names)) if names is not None and isinstance(outputs, Mapping) else names
    metrics = OutputMetrics(run.compile, order)
    labels = run.data.test.first(sample_count(run.data))[1]

    def measure(answers: list[np.ndarray]) -> dict[str, float]:
        return metrics(answers, mapped(lambda array: array[: len(answers[0])], labels))

    return measure


def metrics_on_samples(
    run: RunInputs, model: keras.Model, samples: Any, known: Mapping[str, float]
) -> dict[str, float]:
    """Returns the metrics of a model on the test examples on which exported files are measured.

    Args:
        run: Data and settings of the run.
        model: The model.
        samples: The inputs that `export_samples` returns.
        known: Its metrics on all test examples.
    """
    measure = None if measures_all(run.data) else measure_of_outputs(run, model)
    return dict(known) if measure is None else measure(outputs_of(model, samples))


def export_samples(model: keras.Model, data: Data | None, seed: int) -> tuple[Any, np.ndarray | None]:
    """Returns inputs (test data, else random signals) and labels or None, to compare an exported file with the model.

    Raises:
        RecipeError: There are no data, and the shape of the model's inputs is not fully known, or the model takes no
            random numbers.
    """
    if data is not None:
        inputs, labels = data.test.first(sample_count(data))
        inputs = structured(model, inputs)
        return inputs, class_labels(labels)
    try:
        return comparison_inputs(model, seed), None
    except ValueError as error:
        remedy = "Name data (--data, or data of the recipe)."
        raise RecipeError(str(error).replace("Pass data.", remedy)) from error


def class_labels(labels: Any) -> np.ndarray | None:
    """Returns the labels if they are numbers of classes, of shape (examples,); None for others."""
    if labels is None or isinstance(labels, Mapping):
        return None
    classes = labels.reshape(len(labels)) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    return classes if classes.dtype.kind in "iu" and classes.ndim == 1 else None


def structured(model: keras.Model, inputs: Any) -> Any:
    """Returns inputs by name in the structure of the model's inputs, which exports and costs read."""
    if not isinstance(inputs, Mapping) or isinstance(getattr(model, "input", None), Mapping):
        return inputs
    if not isinstance(getattr(model, "input", None), list | tuple):
        return inputs
    return [inputs[tensor.name] for tensor in model.inputs]
