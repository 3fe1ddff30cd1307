"""Labels and weights of examples: one part for each output, as class vectors, or missing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from keras import ops
from keras.src.backend import get_keras_mask

from prunekit.core.runtime import patching


def one_hot(labels: Any, student: Any) -> Any:
    """Returns labels, class numbers or one-hot, as float32 of the shape of the student's logits.

    Raises:
        ValueError: There are no labels, or they have another shape.
    """
    classes = int(student.shape[-1])
    shape = None if labels is None else tuple(labels.shape)
    if shape is not None and len(shape) == len(student.shape) and shape[-1] == classes and classes > 1:
        return ops.cast(labels, "float32")
    if shape is not None and len(shape) == len(student.shape) and shape[-1] == 1:
        labels = ops.squeeze(labels, -1)
    elif shape is None or len(shape) != len(student.shape) - 1:
        raise ValueError(
            'loss="dkd" reads the true class of each example. Received: '
            f"{'no labels' if shape is None else f'labels of shape {shape}'} for outputs of shape "
            f"{tuple(student.shape)}."
        )
    return ops.one_hot(ops.cast(labels, "int32"), classes, dtype="float32")


def for_each_output(given: Any, names: Sequence[str], count: int) -> list[Any]:
    """Returns a structure as one part for each output; what is given once is for all.

    Args:
        given: Labels or weights of examples, as Keras takes them.
        names: Names of the outputs of a model that returns a list.
        count: Number of outputs.
    """
    if given is None or not keras.tree.is_nested(given):
        return [given] * count
    if isinstance(given, Mapping) and len(names) == count:
        return [given.get(name) for name in names]
    leaves = keras.tree.flatten(given)
    return leaves if len(leaves) == count else [None] * count


def position_weights(weights: Any, output: Any, student: Any) -> Any:
    """Returns the weights of examples for each position of an output, float32, 0 at masked ones; or None."""
    mask = get_keras_mask(output)
    if weights is None and mask is None:
        return None
    shape, rank = ops.shape(student)[:-1], len(student.shape) - 1
    found = ops.ones(shape, "float32")
    for one in (weights, mask):
        if one is not None:
            one = ops.cast(one, "float32")
            found = found * ops.reshape(one, (*ops.shape(one), *[1] * (rank - len(one.shape))))
    return found


def measuring(model: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the replacement of `compute_metrics`: compiled metrics are left out of steps without labels.

    Args:
        model: A compiled model.
        method: Its `compute_metrics`.
    """

    @functools.wraps(method)
    def compute_metrics(x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        metrics = getattr(model, "_compile_metrics", None)
        if y is not None or metrics is None:
            return method(x, y, *args, **kwargs)
        if not metrics.built:
            raise ValueError(
                "Metrics read labels. Received: training data without labels, and a model that was compiled with "
                "metrics and never trained with labels. Build it anew and compile it without `metrics`: a second "
                "compile() keeps them, and so does clone_model."
            )
        with patching.shadowed(model, "_compile_metrics", None):
            return method(x, y, *args, **kwargs)

    return compute_metrics
