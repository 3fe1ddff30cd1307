"""Losses as loops and gradients take them: Keras's own, their names, or functions; of a batch, or of each example."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import ops


class FunctionLoss(keras.losses.Loss):
    """A function (y_true, y_pred) -> one loss per example, averaged over the batch."""

    def __init__(self, function: Callable[..., Any]):
        # Keras makes a scope of the name, and refuses "<lambda>" and "_private".
        name = getattr(function, "__name__", "")
        super().__init__(name=name if name.isidentifier() and not name.startswith("_") else "loss")
        self._function = function

    def call(self, y_true, y_pred):
        return self._function(y_true, y_pred)


def as_loss(loss: Any) -> keras.losses.Loss:
    """A Keras loss, from itself, its name, or a function (y_true, y_pred) -> one loss per example.

    Raises:
        ValueError: `loss` is None, or no Keras loss has that name.
    """
    found = keras.losses.get(loss)
    if found is None:
        raise ValueError("A training needs a loss: a Keras loss, its name, or a function. Received: None.")
    return found if isinstance(found, keras.losses.Loss) else FunctionLoss(found)


def leaves_up_to(structure: Any, values: Any) -> list[Any]:
    """The parts of `values` that stand where `structure` has its leaves."""
    if isinstance(structure, Mapping):
        return [leaf for key in structure for leaf in leaves_up_to(structure[key], values[key])]
    if isinstance(structure, list | tuple):
        return [leaf for one, value in zip(structure, values, strict=True) for leaf in leaves_up_to(one, value)]
    return [values]


def loss_of(losses: Any, y: Any, prediction: Any, *, per_example: bool = False) -> Any:
    """The loss of a batch, a scalar; or of each example as if it were a batch of its own, of shape (batch,).

    Computed in the prediction's precision, at least float32: Keras's own call would cast float64 down. What layers add
    (regularizers) is not in it.

    Args:
        losses: A loss, its name or a function; a list or dictionary of these, shaped like the outputs.
        y: What the outputs are compared with, of shape (batch, ...), or a structure of these.
        prediction: What the model returned.
        per_example: Whether examples are kept apart.

    Raises:
        ValueError: A loss is no array with one row per example; the structures differ.
    """
    losses = keras.tree.map_structure(as_loss, losses)
    try:
        keras.tree.assert_same_structure(losses, prediction)
        parts = list(zip(*(leaves_up_to(losses, each) for each in (losses, y, prediction)), strict=True))
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise ValueError(
            "Losses, y and the model's outputs have one structure: one loss for one output, or a list or dictionary of "
            f"losses like the outputs. Received: loss={losses!r}, outputs {_shapes(prediction)}, y {_shapes(y)}."
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
            f"A loss gives one value per example, and is averaged afterwards. Received: {loss.name!r}, which gives "
            f"shape {tuple(values.shape)} for outputs of shape {tuple(output.shape)}. Let it reduce other axes only."
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
