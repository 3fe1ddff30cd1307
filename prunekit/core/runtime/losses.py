"""Computes losses per batch or per example, from Keras losses, their names, or functions."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.sparsity.array_ops import array_of


class FunctionLoss(keras.losses.Loss):
    """Keras loss made of a function (y_true, y_pred) -> one loss per example; averages over the batch."""

    def __init__(self, function: Callable[..., Any]):
        # Keras uses the name as a scope name, and refuses "<lambda>" and "_private".
        name = getattr(function, "__name__", "")
        super().__init__(name=name if name.isidentifier() and not name.startswith("_") else "loss")
        self._function = function

    def call(self, y_true, y_pred):
        return self._function(y_true, y_pred)


def as_loss(loss: Any) -> keras.losses.Loss:
    """Returns a Keras loss, given a Keras loss, its name, or a function (y_true, y_pred) -> one loss per example.

    Raises:
        ValueError: `loss` is None or an unknown name.
    """
    found = keras.losses.get(loss)
    if found is None:
        raise ValueError("Training needs a loss: a Keras loss, its name, or a function. Received: None.")
    return found if isinstance(found, keras.losses.Loss) else FunctionLoss(found)


def leaves_up_to(structure: Any, values: Any) -> list[Any]:
    """Returns the parts of `values` at the positions of the leaves of `structure`."""
    if isinstance(structure, Mapping):
        return [leaf for key in structure for leaf in leaves_up_to(structure[key], values[key])]
    if isinstance(structure, list | tuple):
        return [leaf for one, value in zip(structure, values, strict=True) for leaf in leaves_up_to(one, value)]
    return [values]


def loss_of(losses: Any, y: Any, prediction: Any, *, per_example: bool = False) -> Any:
    """Returns the loss of a batch, a scalar, or the loss of each example as a batch of one, shape (batch,).

    Computed in the prediction's precision, at least float32; a call of the Keras loss would cast float64 down. Losses
    that layers add (regularizers) are not included.

    Args:
        losses: A loss, its name or a function; or a list or dictionary of these with the structure of the outputs.
        y: Targets of shape (batch, ...), or a structure of targets.
        prediction: Outputs of the model.
        per_example: True returns one loss per example.

    Raises:
        ValueError: A loss does not return one row per example; the structures differ.
    """
    losses = keras.tree.map_structure(as_loss, losses)
    try:
        keras.tree.assert_same_structure(losses, prediction)
        parts = list(zip(*(leaves_up_to(losses, each) for each in (losses, y, prediction)), strict=True))
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise ValueError(
            "Losses, y and the model's outputs must have the same structure: one loss for one output, or a list or "
            f"dictionary of losses like that of the outputs. Received: loss={losses!r}, outputs {_shapes(prediction)}, "
            f"y {_shapes(y)}."
        ) from error
    values = [_reduced(*part, per_example=per_example) for part in parts]
    return sum(values[1:], values[0])


def _shapes(structure: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: f"of shape {tuple(getattr(leaf, 'shape', ()))}", structure)


def _reduced(loss: keras.losses.Loss, y: Any, output: Any, *, per_example: bool) -> Any:
    dtype = "float64" if keras.backend.standardize_dtype(output.dtype) == "float64" else "float32"
    values = loss.call(ops.cast(ops.convert_to_tensor(y), dtype), ops.cast(output, dtype))
    if not len(values.shape) or values.shape[0] != output.shape[0]:
        raise ValueError(
            f"A loss must return one value per example; the mean is taken afterwards. Received: {loss.name!r}, which "
            f"returns shape {tuple(values.shape)} for outputs of shape {tuple(output.shape)}. Do not "
            "reduce the batch axis."
        )
    mask = getattr(output, "_keras_mask", None)
    weights = ops.ones_like(values)
    if mask is not None:
        mask = ops.cast(mask, dtype)
        weights = weights * ops.reshape(mask, (*ops.shape(mask), *[1] * (len(values.shape) - len(mask.shape))))
        values = values * weights
    axes = tuple(range(1, len(values.shape))) if per_example else None
    total = ops.sum(values, axes) if axes != () else values
    if loss.reduction in (None, "none", "sum"):
        return total
    count = ops.sum(weights, axes) if axes != () else weights
    return ops.divide_no_nan(total, count)


def check_classes(model: Any, labels: Any) -> None:
    """Raises if labels do not number classes of the outputs whose loss is a sparse categorical cross-entropy.

    Args:
        model: A compiled model.
        labels: The labels of a batch, in the structure of the outputs.

    Raises:
        ValueError: The labels have another shape than one number for each prediction, or a class that does not exist.
    """
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or [])
    losses, given = keras.tree.flatten(model.loss), keras.tree.flatten(labels)
    if not len(outputs) == len(losses) == len(given):
        return
    for output, loss, leaf in zip(outputs, losses, given, strict=True):
        if loss == "sparse_categorical_crossentropy" or isinstance(loss, keras.losses.SparseCategoricalCrossentropy):
            _check_classes(output, array_of(leaf), getattr(loss, "ignore_class", None))


def _check_classes(output: Any, labels: np.ndarray, ignored: int | None) -> None:
    rank, classes = len(output.shape), output.shape[-1]
    if labels.ndim != rank - 1 and (labels.ndim != rank or labels.shape[-1] != 1):
        raise ValueError(
            f"A sparse categorical cross-entropy reads one class number for each prediction. Received: labels of shape "
            f"{labels.shape}. Pass labels.argmax(-1) of one-hot labels, or compile with categorical_crossentropy."
        )
    known = labels if ignored is None else labels[labels != ignored]
    if known.dtype.kind == "f" and not np.isfinite(known).all():
        raise ValueError("Labels number the classes. Received: labels that are NaN or infinite.")
    if classes is not None and known.size and not (0 <= known.min() and known.max() < classes):
        raise ValueError(
            f"The model tells {classes} classes apart, numbered from 0 to {classes - 1}. Received: labels from "
            f"{known.min():g} to {known.max():g}. Number the classes from 0, or pass data of the model's own task."
        )
