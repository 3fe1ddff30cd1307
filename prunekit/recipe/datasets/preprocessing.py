"""Applies the Keras layers of `preprocessing` to the inputs of the data, adapted on the training examples."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from prunekit.core.runtime.environment import is_installed
from prunekit.recipe.datasets.batches import IndexedBatches
from prunekit.recipe.datasets.parts import (
    READ_AT_ONCE,
    Arrays,
    Part,
    mapped,
    naming_damaged_file,
    require_tensorflow_for,
)
from prunekit.recipe.settings.data_source import DataSource
from prunekit.recipe.settings.fields import nearest, shown
from prunekit.recipe.text.loader import RecipeError

# Layer -> the option that replaces its adaptation.
_ADAPTED = {
    "Discretization": "bin_boundaries",
    "IntegerLookup": "vocabulary",
    "Normalization": "mean",
    "StringLookup": "vocabulary",
    "TextVectorization": "vocabulary",
}
# Layers that compute with TensorFlow on every backend; `Discretization.adapt` does (Keras 3.15).
_OF_TENSORFLOW = ("Discretization", "IntegerLookup", "StringLookup", "TextVectorization")

Layers = list[tuple[str, keras.layers.Layer]]


def preparation(source: DataSource, train: Part) -> tuple[Callable[[Arrays], Arrays], tuple[str, ...]]:
    """Returns the function that prepares a batch of inputs, and notes.

    The function takes and returns TensorFlow tensors, or NumPy arrays where TensorFlow is not installed.

    Args:
        source: Data settings of the recipe.
        train: Training examples, without those held out: layers such as Normalization are adapted to them.

    Raises:
        RecipeError: A layer refuses its options or the inputs, or there is no such input.
    """
    inputs = train.example[0]
    chains = _chains(source, inputs)
    scale = mapped(lambda array: _scale(source, array), inputs)

    def scaled(batch: Arrays) -> Arrays:
        return mapped(_scaled, batch, scale)

    notes = []
    if isinstance(chains, Mapping):
        for name in chains:
            notes += _adapt(chains[name], train, _of_input(scaled, name), f" of input {name!r}")
    elif chains:
        notes += _adapt(chains, train, scaled, "")

    if source.preprocessing is not None:
        notes.append(
            "data: preprocessing is applied to the data and is no part of the model: the model and its exports take "
            "preprocessed inputs."
        )

    def prepare(batch: Arrays) -> Arrays:
        batch = scaled(batch)
        if isinstance(chains, Mapping):
            return {name: _applied(chains.get(name, []), tensor) for name, tensor in batch.items()}
        return _applied(chains, batch)

    return prepare, tuple(notes)


def _of_input(scaled: Callable[[Arrays], Arrays], name: str) -> Callable[[Arrays], Any]:
    return lambda batch: scaled(batch)[name]


def _chains(source: DataSource, inputs: Arrays) -> Any:
    """Returns the layers for one input, or {input: layers} for several."""
    given = source.preprocessing
    if isinstance(inputs, Mapping):
        if given is not None and not isinstance(given, Mapping):
            raise RecipeError(
                f"data.preprocessing: the data have the inputs {', '.join(inputs)}, so layers are given for each by "
                f"name, such as {{{next(iter(inputs))}: [Normalization]}}. Received: a list."
            )
        for name in given or ():
            if name not in inputs:
                raise RecipeError(f"data.preprocessing: the data have no input {shown(name)}.{nearest(name, inputs)}")
        return {name: _made(items) for name, items in (given or {}).items()}
    if isinstance(given, Mapping):
        raise RecipeError(
            "data.preprocessing: the data have one input, so layers are a list, such as [Normalization]. Received: a "
            "mapping."
        )
    return _made(given or [])


def _made(items: list[dict[str, dict[str, Any]]]) -> Layers:
    found = []
    for item in items:
        name, options = next(iter(item.items()))
        if name in _OF_TENSORFLOW:
            require_tensorflow_for(f"data.preprocessing: {name}", "save the layer's outputs as the data")
        try:
            found.append((name, getattr(keras.layers, name)(**options)))
        except (TypeError, ValueError) as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise RecipeError(f"data.preprocessing: {name} refuses its options: {line}.") from error
    return found


def _adapt(layers: Layers, train: Part, select: Callable[[Arrays], Any], owner: str) -> list[str]:
    """Adapts each layer that learns from data to the outputs of the layers before it."""
    notes = []
    for index, (name, layer) in enumerate(layers):
        before = layers[:index]
        try:
            if name in _ADAPTED and layer.get_config().get(_ADAPTED[name]) is None:
                examples = train.in_order(READ_AT_ONCE)
                with naming_damaged_file([train]):
                    layer.adapt(_inputs_of(examples, before, select))
                notes.append(f"data: {name}{owner} is adapted to the {train.examples:,} training examples.")
            elif not layer.built:
                _applied(layers[: index + 1], select(_tensors(train.example[0])))
        except RecipeError:
            raise
        except Exception as error:
            # Catch every exception: each layer has its own exception types for inputs that do not fit.
            line = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise RecipeError(f"data.preprocessing: {name}{owner} does not fit the inputs: {line}.") from error
    return notes


def _inputs_of(batches: Any, layers: Layers, select: Callable[[Arrays], Any]) -> Any:
    """Returns the outputs of the layers for the selected inputs of all batches, as `adapt` takes them."""
    if isinstance(batches, IndexedBatches):
        # One array: the kinds of batches that `adapt` takes differ between versions of Keras.
        return np.concatenate([_applied(layers, select(inputs)) for inputs, _ in batches])
    return batches.map(lambda inputs, _: _applied(layers, select(inputs)))


def _applied(layers: Layers, values: Any) -> Any:
    """Returns the outputs of the layers: a NumPy array for a NumPy array, a TensorFlow tensor for any tensor."""
    outputs = values
    for _, layer in layers:
        outputs = layer(outputs)
    return keras.ops.convert_to_numpy(outputs) if isinstance(values, np.ndarray) else outputs


def _tensors(arrays: Arrays) -> Arrays:
    if not is_installed("tensorflow"):
        return arrays
    import tensorflow as tf

    return mapped(tf.convert_to_tensor, arrays)


def _scale(source: DataSource, array: np.ndarray) -> float | None:
    if source.scale is not None:
        return source.scale if array.dtype.kind in "biuf" else None
    return 255.0 if array.dtype == np.uint8 and source.factory is None else None


def _scaled(tensor: Any, scale: float | None) -> Any:
    if isinstance(tensor, np.ndarray):
        if scale is not None:
            return tensor.astype("float32") / np.float32(scale)
        return tensor.astype("float32", copy=False) if tensor.dtype.kind in "fb" else tensor
    import tensorflow as tf

    if scale is not None:
        return tf.cast(tensor, tf.float32) / np.float32(scale)
    if tensor.dtype.is_floating or tensor.dtype.is_bool:
        return tf.cast(tensor, tf.float32)
    return tensor
