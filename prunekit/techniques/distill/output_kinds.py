"""What an output of a model is: logits of classes, probabilities after a softmax or sigmoid, or other values."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import keras
from keras import ops

from prunekit.core.statistics.layer_observer import activation_of

# Probabilities are read down to this one, as by Keras's losses.
_LEAST = 1e-7


class OutputKind(Enum):
    """What an output of a model is."""

    LOGITS = "logits of classes"
    PROBABILITIES = "probabilities of classes"
    YES_NO_LOGITS = "logits of yes or no"
    YES_NO = "probabilities of yes or no"
    VALUES = "values"

    @property
    def tells_classes(self) -> bool:
        """True for logits and probabilities of classes."""
        return self in (OutputKind.LOGITS, OutputKind.PROBABILITIES)

    @property
    def tells_yes_no(self) -> bool:
        """True for logits and probabilities of yes or no."""
        return self in (OutputKind.YES_NO_LOGITS, OutputKind.YES_NO)


_ACTIVATIONS = {"softmax": OutputKind.PROBABILITIES, "sigmoid": OutputKind.YES_NO}
# Names of losses without "_crossentropy" -> kinds of the outputs they read, as logits and as probabilities.
_LOSSES = {
    "categorical": (OutputKind.LOGITS, OutputKind.PROBABILITIES),
    "binary": (OutputKind.YES_NO_LOGITS, OutputKind.YES_NO),
}


def output_kinds(model: Any, like: list[OutputKind] | None = None, loss: Any = None) -> list[OutputKind]:
    """Returns the kind of each output of a model, in the order of `keras.tree.flatten`.

    A softmax or sigmoid at the end is recognised in the model; elsewhere the compiled loss says whether outputs are
    logits.

    Args:
        model: A Keras model.
        like: Kinds of the outputs of the model's student: an output without a softmax, sigmoid or loss is of logits
            where that of the student tells classes apart. None = such outputs are values.
        loss: Loss, or losses by output, in the place of those that the model was compiled with.
    """
    ends = keras.tree.flatten(getattr(model, "outputs", None) or [])
    losses = _losses_of(model, getattr(model, "loss", None) if loss is None else loss)
    count = max(len(ends), 1 if like is None else len(like))
    kinds = []
    for place in range(count):
        kind = _ACTIVATIONS.get(_last_function(ends[place])) if place < len(ends) else None
        kind = kind or (_read_by(losses[place]) if len(losses) == count else None)
        kinds.append(kind or _default(None if like is None else like[place]))
    return kinds


def _losses_of(model: Any, found: Any) -> list[Any]:
    """Returns losses in the order of the outputs."""
    for names in (keys_of(getattr(model, "_outputs_struct", None)), getattr(model, "output_names", None)):
        if isinstance(found, Mapping) and names and not found.keys().isdisjoint(names):
            return [found.get(name) for name in names]
    return [] if found is None else keras.tree.flatten(found)


def keys_of(outputs: Any) -> list[str]:
    """Returns the keys of outputs that are a dictionary, in the order of `keras.tree.flatten`; of others []."""
    if not isinstance(outputs, Mapping):
        return []
    # Keras sorts the keys of some kinds of dictionary.
    return keras.tree.flatten(type(outputs)((key, key) for key in outputs))  # type: ignore[call-arg]


def _default(of_student: OutputKind | None) -> OutputKind:
    if of_student is None:
        return OutputKind.VALUES
    if of_student.tells_classes:
        return OutputKind.LOGITS
    return OutputKind.YES_NO_LOGITS if of_student.tells_yes_no else OutputKind.VALUES


def _last_function(tensor: Any) -> str:
    """Returns the name of the activation function whose result an output of a functional model is, or ""."""
    history = getattr(tensor, "_keras_history", None)
    layer = getattr(history, "operation", None)
    while history is not None and isinstance(layer, keras.Model) and getattr(layer, "outputs", None):
        # A model inside the model: its output is that of its own last layer.
        history = getattr(keras.tree.flatten(layer.outputs)[history.tensor_index], "_keras_history", None)
        layer = getattr(history, "operation", None)
    return "" if layer is None else activation_of(layer)


def _read_by(loss: Any) -> OutputKind | None:
    """Returns the kind of the outputs that a compiled loss reads; None if it does not say."""
    if isinstance(loss, str):
        name, from_logits = loss.lower().replace("_", ""), False
    else:
        name = type(loss).__name__.lower()
        from_logits = bool(getattr(loss, "from_logits", False))
    for key, (logits, probabilities) in _LOSSES.items():
        if name in (f"{key}crossentropy", f"sparse{key}crossentropy", f"{key}focalcrossentropy"):
            return logits if from_logits else probabilities
    return None


def logits_of(kind: OutputKind, output: Any) -> Any:
    """Returns an output as float32 logits; values as they are.

    Probabilities of yes or no get a last axis of two classes: their logit, and 0.

    Args:
        kind: Kind of the output.
        output: Output of a call of the model.
    """
    # Keras notes at the result of a softmax or sigmoid what it was calculated from.
    known = getattr(output, "_keras_logits", None)
    output = ops.cast(output, "float32")
    if kind is OutputKind.PROBABILITIES:
        return ops.log(ops.clip(output, _LEAST, 1.0)) if known is None else ops.cast(known, "float32")
    if kind is OutputKind.YES_NO and known is None:
        inside = ops.clip(output, _LEAST, 1.0 - _LEAST)
        output = ops.log(inside) - ops.log(1.0 - inside)
    elif kind is OutputKind.YES_NO:
        output = ops.cast(known, "float32")
    if kind.tells_yes_no:
        return ops.stack([output, ops.zeros_like(output)], axis=-1)
    return output
