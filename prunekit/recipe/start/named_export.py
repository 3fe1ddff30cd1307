"""Exports the model in a file, compared on data that the command line names."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.files.model_files import load_model
from prunekit.anatomy.graph.example_inputs import input_names
from prunekit.core.data.calibration import batches_of
from prunekit.operations.export import ExportReport, export
from prunekit.recipe.datasets.data import training_examples
from prunekit.recipe.start.starting_recipe import named_source
from prunekit.recipe.state.export_samples import class_labels, export_samples, structured


@dataclass(frozen=True)
class Examples:
    """Data that a command names.

    Attributes:
        data: Name of built-in data, a CSV or npz file, or a folder, as `prunekit init` takes them; None for inputs of
            random numbers.
        label: Column or part that holds the labels.
        count: Examples to read, drawn at random with seed 0.
    """

    data: str | None
    label: str | None
    count: int

    def read(self, model: keras.Model) -> tuple[Any, np.ndarray | None]:
        """Returns inputs in the structure of the model's inputs, and classes or None.

        Raises:
            RecipeError: The data cannot be read, or do not fit the model; without data, the shape of the model's
                inputs is not fully known.
        """
        if self.data is None:
            return export_samples(model, None, 0)
        source = named_source(self.data, self.label, model)
        batches = list(batches_of(training_examples(source, self.count, input_names(model))))
        inputs, labels = (
            None if part[0] is None else keras.tree.map_structure(lambda *parts: np.concatenate(parts), *part)
            for part in zip(*batches, strict=True)
        )
        return structured(model, inputs), class_labels(labels)


def export_named(
    path: str, examples: Examples, target: Path, formats: Sequence[str], name: str, batch_size: int | None
) -> ExportReport:
    """Writes the model in a `.keras` file in other formats; returns a row for each.

    Args:
        path: The model's file.
        examples: Inputs on which files and model are compared.
        target: A folder; or, for one format, a file with an ending of FORMATS.
        formats: Names from FORMATS.
        name: Stem of the names of files in a folder.
        batch_size: As for `export`.

    Raises:
        ValueError: As for `export` and `Examples.read`.
        OSError: A file cannot be written.
    """
    model = load_model(path, compile=False)
    data, labels = examples.read(model)
    return export(model, target, data, formats, name=name, labels=labels, batch_size=batch_size, keep_going=False)
