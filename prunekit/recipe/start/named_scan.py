"""Scans or searches the model in a file on data that the command line names."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.files.model_files import FileRefused, load_model
from prunekit.anatomy.graph.example_inputs import input_names
from prunekit.core.outputs.output_metrics import OutputMetrics
from prunekit.delivery.reports.sensitivity import SensitivityReport
from prunekit.operations.search import SearchResult, search
from prunekit.operations.sensitivity import sensitivity
from prunekit.recipe.datasets.batches import AdvancingOrder
from prunekit.recipe.datasets.data import Data, load_data, training_examples, unlabelled_file
from prunekit.recipe.datasets.parts import Part
from prunekit.recipe.settings.compile_fields import Compile
from prunekit.recipe.settings.data_source import DataSource
from prunekit.recipe.start.starting_recipe import compile_values, named_source
from prunekit.recipe.state.compile_settings import compile_arguments, output_names, reason_of
from prunekit.recipe.text.loader import RecipeError

_SEED, _BATCH = 7, 32
# Bytes of training data that are read at once.
_AT_ONCE = 1e9


def scan_named(model: str, data: str, label: str | None, *, examples: int, **options: Any) -> SensitivityReport:
    """Returns the scan of the model in a file.

    Args:
        model: Path of a `.keras` file. A model that was saved without compile settings is compiled with loss and metric
            that fit its outputs and the labels.
        data: Name of built-in data, a CSV or npz file, or a folder, as `prunekit init` takes them.
        label: Column or part that holds the labels.
        examples: Number of training examples, drawn by a fixed seed.
        **options: Keyword arguments of `sensitivity`.

    Raises:
        RecipeError: The model or the data cannot be read, or do not fit together.
        ValueError: As for `sensitivity`.
    """
    network = compiled_model(model)
    drawn, _ = _drawn(network, named_source(data, label, network), data, examples)
    return sensitivity(network, drawn, **options)


def search_named(
    model: str, data: str, label: str | None, *, examples: int, epochs: int | None = None, **options: Any
) -> SearchResult:
    """Returns the result of a search for the model in a file.

    Args:
        model: As for `scan_named`.
        data: As for `scan_named`. An npz file may have inputs alone.
        label: As for `scan_named`.
        examples: As for `scan_named`.
        epochs: Epochs in which bolder mixtures are trained on the other training examples; None = no training.
        **options: Keyword arguments of `search`.

    Raises:
        RecipeError: As for `scan_named`.
        ValueError: As for `search`.
    """
    network = compiled_model(model)
    source, inputs = named_source(data, label, network), input_names(network)
    if unlabelled_file(source, inputs) is not None:
        if epochs is not None:
            raise RecipeError(f"--epochs trains on labels. Received: {data!r}, which has inputs alone.")
        return search(network, training_examples(source, examples, inputs), **options)
    drawn, others = _drawn(network, source, data, examples)
    if epochs is not None:
        if others is None:
            raise RecipeError(
                f"--epochs trains on other examples of --data than --examples draws. Received: all of {data!r} drawn."
            )
        # Trainings on arrays are kept where a search is interrupted.
        size = others.examples * sum(leaf.nbytes for leaf in keras.tree.flatten(others.example))
        if size <= _AT_ONCE:
            trained = others.first(others.examples)
        else:
            trained = others.training_batches(AdvancingOrder(others.examples, _SEED), _BATCH)
        options["training"] = {"epochs": epochs, "data": trained, "batch_size": _BATCH}
    return search(network, drawn, **options)


def _drawn(model: keras.Model, source: DataSource, name: str, examples: int) -> tuple[tuple[Any, Any], Part | None]:
    """Returns training examples with labels, and the others; None if there are no others. The model is compiled."""
    found = load_data(source, _SEED)
    part, others = found.train, None
    if examples < part.examples:
        order = np.random.default_rng(_SEED).permutation(part.examples)
        part, others = (part.subset(np.sort(drawn)) for drawn in (order[:examples], order[examples:]))
    if not model.compiled:
        compile_for(model, found)
    inputs, labels = part.first(min(examples, part.examples))
    _check(model, part.first(min(8, part.examples)), name)
    return (inputs, labels), others


def compiled_model(path: str) -> keras.Model:
    """Returns the model in a file, compiled if the file has compile settings that can be read."""
    if not path.endswith(".keras"):
        raise RecipeError(f"MODEL is a .keras file. Received: {path}.")
    try:
        return load_model(path)
    except FileRefused:
        # A loss or metric of the user's own cannot be read from the file, and is not needed.
        return load_model(path, compile=False)


def compile_for(model: keras.Model, data: Data) -> None:
    """Compiles a model with loss and metric that fit its outputs and the labels."""
    settings = Compile.model_validate(compile_values(model, data)[0])
    outputs = model(data.train.example[0], training=False)
    model.compile(**compile_arguments(settings, output_names(model, outputs)))


def _check(model: keras.Model, examples: tuple[Any, Any], name: str) -> None:
    inputs, labels = examples
    try:
        OutputMetrics(model, [(inputs, _arrays(labels), None)])([model(inputs, training=False)])
    except Exception as error:
        # Catch every exception: each backend has its own exception types for data that do not fit.
        raise RecipeError(f"the model {model.name!r} cannot be measured on {name}: {reason_of(error)}.") from error


def _arrays(labels: Any) -> Any:
    return dict(labels) if isinstance(labels, Mapping) else labels
