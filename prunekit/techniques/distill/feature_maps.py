"""Outputs of inner layers: recorded while a model is called, projected, and compared."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.core.runtime import backend
from prunekit.core.runtime.patching import wrapped
from prunekit.core.training.joined_variables import trainer_like
from prunekit.suggestions import did_you_mean
from prunekit.techniques.distill.losses import map_error

_SEED = 0


def named_layer(model: Any, name: str, whose: str) -> Any:
    """Returns the layer of a name, also inside models of the model.

    Args:
        model: A built model.
        name: Name of a layer.
        whose: "teacher" or "student", for the error.

    Raises:
        ValueError: No layer, or more than one, has the name.
    """
    layers = [layer for layer in model._flatten_layers() if layer is not model]
    found = [layer for layer in layers if layer.name == name]
    if len(found) != 1:
        wrong = "has no such layer" if not found else f"has {len(found)} layers of this name"
        raise ValueError(
            f"`features` names layers of the student, and of the teacher where their names differ. Received: {name!r}; "
            f"the {whose} {model.name!r} {wrong}.{did_you_mean(name, [layer.name for layer in layers])}"
        )
    return found[0]


class Seen(threading.local):
    """The last outputs of layers in a call of their model.

    Each thread has its own: replicas of a distribution strategy are threads that take turns inside a step.
    """

    def __init__(self, layers: Sequence[Any]):
        self._layers = layers
        self._outputs: dict[int, Any] = {}

    def wrap(self, layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the replacement of a layer's `call`."""

        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self._outputs[id(layer)] = result
            return result

        return watched

    def outputs(self) -> list[Any]:
        """Returns the outputs in the order of the layers.

        Raises:
            ValueError: A layer was not called, or returns more than one tensor.
        """
        found = [self._outputs.get(id(layer)) for layer in self._layers]
        for layer, one in zip(self._layers, found, strict=True):
            if one is None or keras.tree.is_nested(one):
                wrong = "is not called by its model" if one is None else "returns several tensors"
                raise ValueError(
                    f"`features` names layers that their model calls and that return one tensor. Received: "
                    f"{layer.name!r}, which {wrong}."
                )
        return found


@contextlib.contextmanager
def recorded(layers: Sequence[Any]) -> Iterator[Seen]:
    """Records the outputs of layers inside the scope."""
    seen = Seen(layers)
    with contextlib.ExitStack() as stack:
        for layer in {id(one): one for one in layers}.values():
            stack.enter_context(wrapped(layer, "call", functools.partial(seen.wrap, layer)))
        yield seen


class FeaturePairs:
    """The layers of a student that learn from layers of its teacher.

    Args:
        student: The student.
        teacher: The teacher.
        names: {layer of the student: layer of the teacher}.
        optimizers: The optimizers of the training, after whose kind the projections are trained.

    Attributes:
        layers: The student's layers.
        variables: Kernels of the projections, shape (channels of the student, channels of the teacher).
        trainer: Their optimizer; None without projections.

    Raises:
        ValueError: A layer does not exist, its shape is not known, or two maps differ in more than their channels.
    """

    def __init__(self, student: Any, teacher: Any, names: Mapping[str, str], optimizers: Sequence[Any]):
        pairs = [
            (named_layer(student, one, "student"), named_layer(teacher, two, "teacher")) for one, two in names.items()
        ]
        self.layers = [one for one, _ in pairs]
        self.variables: list[Any] = []
        self.trainer: Any = None
        self._axes = [_channel_axis(one) for one in self.layers]
        self._projections: list[Any] = []
        random = np.random.default_rng(_SEED)
        with backend.variable_scope(student):
            for (one, two), axis in zip(pairs, self._axes, strict=True):
                widths = _widths(one, two, axis)
                self._projections.append(None if widths is None else _kernel(widths, random))
            self.variables = [kernel for kernel in self._projections if kernel is not None]
            if self.variables:
                self.trainer = trainer_like(optimizers, self.variables)

    def error(self, teacher: Sequence[Any], student: Sequence[Any]) -> Any:
        """Returns the mean error of the layers' maps, shape (batch,).

        Args:
            teacher: Outputs of the teacher's layers.
            student: Outputs of the student's layers.
        """
        errors = []
        for wanted, found, kernel, axis in zip(teacher, student, self._projections, self._axes, strict=True):
            found = ops.cast(found, "float32")
            if kernel is not None:
                found = ops.moveaxis(ops.matmul(ops.moveaxis(found, axis, -1), kernel), -1, axis)
            errors.append(map_error(wanted, found))
        return sum(errors[1:], errors[0]) / len(errors)


def _kernel(widths: tuple[int, int], random: np.random.Generator) -> Any:
    bound = np.sqrt(6 / sum(widths))
    return keras.Variable(random.uniform(-bound, bound, widths), dtype="float32", autocast=False)


def _channel_axis(layer: Any) -> int:
    return 1 if getattr(layer, "data_format", None) == "channels_first" else -1


def _widths(student: Any, teacher: Any, axis: int) -> tuple[int, int] | None:
    """Returns the numbers of channels of two layers; None if they are equal."""
    shapes = [list(_shape(layer)) for layer in (student, teacher)]
    widths = [shape[axis] for shape in shapes]
    for shape in shapes:
        shape[axis] = None
    if len(shapes[0]) != len(shapes[1]) or any(
        one != two and None not in (one, two) for one, two in zip(*shapes, strict=True)
    ):
        raise ValueError(
            "Two maps are compared position by position, so they may differ in their channels alone. Received: "
            f"{student.name!r} of shape {_shape(student)} and {teacher.name!r} of the teacher, of shape "
            f"{_shape(teacher)}. Name layers of equal sizes: features={{student layer: teacher layer}}."
        )
    return None if widths[0] == widths[1] else (widths[0], widths[1])


def _shape(layer: Any) -> tuple[Any, ...]:
    try:
        return tuple(layer.output.shape)
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"`features` names layers of models whose shapes Keras knows. Received: {layer.name!r}, whose output shape "
            "is not known. Build the model with keras.Model or keras.Sequential."
        ) from error
