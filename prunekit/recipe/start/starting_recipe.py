"""Writes a commented recipe for a given model and given data, as a start."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.graph.example_inputs import input_names
from prunekit.core.runtime.partial_files import partial_file
from prunekit.recipe.datasets.arrays import arrays_by_name, existing
from prunekit.recipe.datasets.csv_files import column_names, few
from prunekit.recipe.datasets.data import Data, load_data
from prunekit.recipe.datasets.images import class_names
from prunekit.recipe.datasets.parts import Labels
from prunekit.recipe.run.plan import plan
from prunekit.recipe.settings.applications import applications
from prunekit.recipe.settings.data_source import DataSource
from prunekit.recipe.settings.schema import VERSION
from prunekit.recipe.settings.sources import ModelSource
from prunekit.recipe.start.starting_steps import starting_steps, steps_without_data, text_of, variables_of
from prunekit.recipe.state.compile_settings import are_logits, output_names, reason_of
from prunekit.recipe.state.models import MODELS, build_model
from prunekit.recipe.text.loader import RecipeError, load_recipe
from prunekit.sparsity.shorthands import Goal
from prunekit.suggestions import did_you_mean

BUILTIN_DATA = ("digits", "diabetes", "fashion-mnist")
_MODEL_FOR = {"digits": "digits-cnn", "diabetes": "diabetes-mlp", "fashion-mnist": "fashion-cnn"}
_SAVED = ("dataset_spec.pb", "snapshot.metadata")
_SEED, _BATCH = 7, 32
# For a folder of images without a model: small, and every runtime for phones and browsers runs its layers.
_FOR_IMAGES, _IMAGE_SIZE = "MobileNetV2", 96


@dataclass(frozen=True)
class Start:
    """Model, data and file of a recipe to write.

    Attributes:
        model: Path of a `.keras` file, or name of a built-in model or of a model in `keras.applications`; None chooses
            the built-in model of built-in data, and MobileNetV2 for a folder of images.
        data: Name of built-in data, a CSV or npz file, or a folder of images or of a saved data set; None for a recipe
            that prunes without training.
        label: Column of a CSV file, or part of a saved data set, that holds the labels.
        target: File that the recipe will be written to; other paths in it are relative to its folder.
        goal: Where the model will run; None for a recipe that keeps the model's size.
    """

    model: str | None
    data: str | None
    label: str | None
    target: Path
    goal: Goal | None = None

    def path(self, name: str) -> str:
        """Returns a path as the recipe names it: relative to the recipe's folder if it is inside that folder."""
        whole, folder = Path(name).resolve(), self.target.resolve().parent
        return str(whole.relative_to(folder)) if whole.is_relative_to(folder) else str(whole)


def write_starting_recipe(start: Start) -> tuple[str, tuple[str, ...]]:
    """Writes the recipe to `start.target`, after a check that it can be planned; returns its text and the plan's notes.

    Raises:
        RecipeError: The model or the data cannot be read, or do not fit together.
        ValueError: The model has no weight to prune.
    """
    text = starting_recipe(start)
    start.target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target: paths in a recipe are relative to its folder.
    try:
        with partial_file(start.target, f".unfinished-{start.target.name}") as partial:
            partial.write_text(text, encoding="utf-8")
            found = plan(load_recipe(partial))
    except RecipeError as error:
        # Without the place: the file is not kept.
        raise RecipeError(error.message) from error
    return text, (*found.notes, *(() if found.data is None else found.data.notes))


def check_label(data: str, label: str | None) -> None:
    """Raises a RecipeError for a CSV file without the name of the label's column."""
    if data.endswith(".csv") and label is None:
        columns = column_names(existing(data))
        raise RecipeError(
            f"the label of {data} is one of its columns: name it with --label COLUMN. Columns: {few(columns)}."
        )


def starting_recipe(start: Start) -> str:
    """Returns the text of the recipe.

    Raises:
        ValueError: As for `write_starting_recipe`, RecipeError included.
    """
    # Before a model is built, which takes seconds.
    if start.data is not None:
        check_label(start.data, start.label)
    model_lines, source = _model(start)
    model = build_model(source, _SEED)
    name = "digits" if start.data is None and start.model is None else start.data
    if name is None and start.goal is not None:
        raise RecipeError(f"the steps for a {start.goal} train, and need data: add --data DATA.")
    if name is None:
        return _joined(start, [*model_lines, *steps_without_data(model)], ["sparsity: 0.5"])
    data_lines, values = _source(start, name, model)
    settings, metric = compile_values(model, load_data(_validated(values), _SEED))
    compiled = ["compile:", *(f"  {name}: {text_of(value)}" for name, value in settings.items())]
    # A model from a file is trained already; a built-in model is not.
    trained = source.file is not None
    steps = starting_steps(model, start.goal, text_of(metric), trained=trained)
    return _joined(start, [*model_lines, "data:", *data_lines, *compiled, *steps], variables_of(steps))


def _joined(start: Start, body: list[str], variables: list[str]) -> str:
    file = start.target.name
    head = [
        f"# A start, written by prunekit init. What it would do: prunekit check {file} --plan",
        f"# To run it: prunekit compress {file}",
        f"version: {VERSION}",
        f"seed: {_SEED}                         # same seed and same machine: same bytes",
        *(["variables:", *(f"  {line}" for line in variables)] if variables else []),
    ]
    return "\n".join([*head, *body]) + "\n"


# ---- model -----------------------------------------------------------------------------------------------------------


def _model(start: Start) -> tuple[list[str], ModelSource]:
    name = start.model
    if name is None and start.data in (None, *_MODEL_FOR):
        name = _MODEL_FOR[start.data or "digits"]
    if name in MODELS:
        return ["model:", f"  builtin: {name}"], ModelSource(builtin=name)  # type: ignore[arg-type]
    if name is not None and os.path.isfile(name):
        if not name.endswith(".keras"):
            raise RecipeError(f"MODEL is a .keras file. Received: {name}. For data, write --data {name}.")
        return ["model:", f"  file: {text_of(start.path(name))}"], ModelSource(file=os.path.abspath(name))
    images = is_folder_of_images(start.data)
    if name is None and images:
        name = _FOR_IMAGES
    if name is None:
        raise RecipeError(
            f"init needs a model for the data {start.data!r}: name a .keras file, or a built-in model "
            f"({', '.join(MODELS)})."
        )
    if name not in applications():
        raise RecipeError(
            f"the model {name} does not exist.{did_you_mean(name, [*MODELS, *applications()])} Expected a .keras file, "
            f"a built-in model ({', '.join(MODELS)}), or a model of keras.applications, such as {_FOR_IMAGES}."
        )
    if not images:
        raise RecipeError(
            f"init writes a recipe for {name} with a folder of images, which gives the number of classes: add --data "
            f"FOLDER. Received: --data {start.data}."
            if start.data is not None
            else f"init needs a folder of images for {name}, which gives the number of classes: add --data FOLDER."
        )
    return _application(name, Path(str(start.data)))


def _application(name: str, folder: Path) -> tuple[list[str], ModelSource]:
    """Returns the lines and the source of an untrained application for a folder with one folder for each class."""
    size, classes = _IMAGE_SIZE, len(class_names(folder))
    if not classes:
        raise RecipeError(f"{folder} must hold one folder of images for each class. Received: no folder in it.")
    lines = [
        "model:",
        f"  application: {name}      # of keras.applications",
        f"  input_shape: [{size}, {size}, 3]",
        f"  classes: {classes}",
        "  weights: null               # trained from the start; or a file of weights",
    ]
    return lines, ModelSource(application=name, input_shape=(size, size, 3), classes=classes)


# ---- data ------------------------------------------------------------------------------------------------------------


def named_source(data: str, label: str | None, model: keras.Model) -> DataSource:
    """Returns the source of data that a command names.

    Args:
        data: Name of built-in data, a CSV or npz file, or a folder of images or of a saved data set.
        label: Column or part that holds the labels.
        model: The model to read them for.

    Raises:
        RecipeError: There are no such data, or they do not fit the model.
    """
    check_label(data, label)
    _, values = _source(Start(None, data, label, Path("recipe.yaml")), data, model)
    return _validated(values)


def names_of_inputs(model: Any) -> list[str]:
    """Returns the names of the inputs of a Keras model, or of a LiteRT file."""
    return list(getattr(model, "signature_inputs", None) or input_names(model))


def _validated(values: Mapping[str, Any]) -> DataSource:
    return DataSource.model_validate({key: value for key, value in values.items() if value is not None})


def _source(start: Start, name: str, model: keras.Model) -> tuple[list[str], dict[str, Any]]:
    """Returns the lines of the data's source, and its settings."""
    path = os.path.abspath(name)
    if start.label is not None and (name in BUILTIN_DATA or name.endswith(".npz")):
        raise RecipeError(f"--label is for CSV files and saved data sets. Received: {start.label!r} for {name}.")
    if name in BUILTIN_DATA and not os.path.exists(path):
        return [f"  builtin: {name}"], {"builtin": name}
    if name.endswith(".csv"):
        lines = [f"  csv: {text_of(start.path(name))}", f"  label: {text_of(start.label)}", *_HELD_OUT]
        return lines, {"csv": path, "label": start.label, **_SPLIT}
    if name.endswith(".npz"):
        outputs = list(getattr(model, "output_names", None) or ())
        arrays = arrays_by_name(existing(name), names_of_inputs(model), outputs)
        lines = [f"  arrays: {text_of(arrays)}"] if arrays else []
        return [f"  npz: {text_of(start.path(name))}", *lines], {"npz": path, "arrays": arrays or None}
    if not os.path.isdir(path):
        raise RecipeError(
            f"DATA is built-in data ({', '.join(BUILTIN_DATA)}), .csv and .npz files, folders of images and saved "
            f"data sets. Received: {name}, which is no folder."
        )
    if _is_saved(path):
        label = [] if start.label is None else [f"  label: {text_of(start.label)}"]
        return [f"  tfds_saved: {text_of(start.path(name))}", *label], {"tfds_saved": path, "label": start.label}
    if start.label is not None:
        raise RecipeError(f"the labels of images are the names of their folders. Received: --label {start.label}.")
    return _images(start, name, model)


def _is_saved(path: str) -> bool:
    """Returns True for a folder that tf.data.Dataset.save wrote, or with such a folder named train."""
    return any(Path(path, *part, file).is_file() for part in ((), ("train",)) for file in _SAVED)


def is_folder_of_images(name: str | None) -> bool:
    """Returns True for a folder that holds no saved data set."""
    return name is not None and os.path.isdir(name) and not _is_saved(name)


_SPLIT = {"validation": 0.2, "test": 0.1}
_HELD_OUT = ["  validation: 0.2               # parts of the examples, chosen by the seed", "  test: 0.1"]


def _images(start: Start, name: str, model: keras.Model) -> tuple[list[str], dict[str, Any]]:
    shape = tuple(getattr(model, "input_shape", None) or ())
    if len(shape) != 4 or shape[-1] not in (1, 3, 4):
        raise RecipeError(
            "a folder of images needs a model with inputs of shape (rows, columns, 1, 3 or 4). Received: "
            f"{model.name!r}, of input shape {shape[1:]}."
        )
    size = [length or 96 for length in shape[1:3]]
    colours = {1: "grayscale", 3: "rgb", 4: "rgba"}[shape[-1]]
    lines = [f"  images: {text_of(start.path(name))}            # one folder for each class", f"  size: {size}"]
    lines += [f"  color_mode: {colours}", *_HELD_OUT]
    values = {"images": os.path.abspath(name), "size": size, "color_mode": colours, **_SPLIT}
    if not _scales(model):
        lines.append(
            "  preprocessing: [{Rescaling: {scale: 0.00392156862745098}}]  # pixels are 0 to 255; as in training"
        )
        values["preprocessing"] = [{"Rescaling": {"scale": 1 / 255}}]
    return lines, values


def _scales(model: keras.Model) -> bool:
    """Returns True if the model contains a layer that scales its inputs."""
    kinds = (keras.layers.Rescaling, keras.layers.Normalization)
    return any(isinstance(layer, kinds) for layer in model._flatten_layers())


# ---- compile settings ------------------------------------------------------------------------------------------------


def compile_values(model: keras.Model, data: Data) -> tuple[dict[str, Any], str]:
    """Returns compile settings that fit the model's outputs and the labels, and the name of the main metric."""
    inputs, first = data.train.first(8)
    try:
        outputs = model(inputs, training=False)
    except Exception as error:
        # Catch every exception: each backend has its own exception types for inputs that do not fit.
        raise RecipeError(
            f"the model {model.name!r} does not accept the inputs of {data.name}: {reason_of(error)}. Choose other "
            "data, or prepare them with data.preprocessing of a recipe (docs/data.md)."
        ) from error
    names, labels = output_names(model, outputs), data.train.labels()
    found = set(labels) if isinstance(labels, Mapping) else None
    if found != (None if names is None else set(names)):
        wanted = "one array of labels" if names is None else f"labels named {', '.join(names)}"
        raise RecipeError(f"the model {model.name!r} needs {wanted}. Received: {', '.join(found or ('one array',))}.")
    losses: Any
    metrics: Any
    if names is None:
        losses, metric, logits = _loss(keras.ops.convert_to_numpy(outputs), labels, first)
        metrics = _entry(metric, logits)
    else:
        flat = [outputs[name] for name in names] if isinstance(outputs, Mapping) else outputs
        arrays = map(keras.ops.convert_to_numpy, flat)
        chosen = {name: _loss(array, labels[name], first[name]) for name, array in zip(names, arrays, strict=True)}
        losses = {name: loss for name, (loss, _, _) in chosen.items()}
        metrics = {name: _entry(metric, unscaled) for name, (_, metric, unscaled) in chosen.items()}
        logits, metric = any(logits for *_, logits in chosen.values()), f"{names[0]}_{chosen[names[0]][1]}"
    scaled = {"from_logits": True} if logits else {}
    optimizer = {"name": "adam", "learning_rate": 0.0005}
    return {"optimizer": optimizer, "loss": losses, **scaled, "metrics": metrics, "batch_size": _BATCH}, metric


def _loss(outputs: np.ndarray, labels: Labels, first: np.ndarray) -> tuple[str, str, bool]:
    """Returns loss, metric and `from_logits` for one output.

    Args:
        outputs: Outputs for the first examples, shape (examples, ...).
        labels: Facts about the labels of all examples.
        first: Labels of the first examples, shape (examples, ...).
    """
    # Outputs of shape (examples,) are one number for each example.
    outputs = np.asarray(outputs, np.float32).reshape(*outputs.shape, *([1] if outputs.ndim == 1 else []))
    classes, shape = outputs.shape[-1], tuple(labels.shape)
    whole = labels.whole and labels.low >= 0
    logits = are_logits(outputs)
    # Probabilities rounded to bfloat16 miss 1 by up to 0.002.
    sums = not logits and bool(np.allclose(outputs.sum(axis=-1), 1.0, atol=1e-2))
    if whole and classes > 1 and shape in (outputs.shape[1:-1], (*outputs.shape[1:-1], 1)):
        return "sparse_categorical_crossentropy", "accuracy", not sums
    if whole and labels.high == 1 and shape == outputs.shape[1:] and classes > 1:
        one_hot = bool(np.all(first.sum(axis=-1) == 1))
        if sums or (one_hot and logits):
            return "categorical_crossentropy", "accuracy", logits
        # Several classes may be right at once, so it is not the categorical accuracy that "accuracy" means here.
        return "binary_crossentropy", "binary_accuracy", logits
    if whole and labels.high == 1 and classes == 1:
        return "binary_crossentropy", "binary_accuracy", logits
    return "mse", "mae", False


def _entry(metric: str, logits: bool) -> list[Any]:
    """Returns the list `metrics` of a metric."""
    if metric == "binary_accuracy" and logits:
        # Keras compares outputs with 0.5; the logit of probability 0.5 is 0.
        return [{"metric": "binary_accuracy", "arguments": {"threshold": 0.0}}]
    return [metric]
