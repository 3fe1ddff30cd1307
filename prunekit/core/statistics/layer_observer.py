"""Observes one pass of a model over real tensors: each layer's output and the input of its activation function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
from keras import ops

from prunekit.anatomy.graph.watching import watching_outside_loops
from prunekit.core.runtime import patching

# Activation functions at a model's end that losses invert.
LINKS = ("softmax", "sigmoid")


def observe(
    model: Any,
    inputs: Any,
    see: Callable[[Any, Any, Any], None],
    *,
    training: bool = True,
    values: Sequence[tuple[Any, Any]] = (),
) -> Any:
    """Returns the model's outputs on `inputs` and calls `see(layer, before, after)` after every layer call.

    `after` is the layer's first floating-point output, and `before` the same tensor before the activation function.
    Layers inside recurrent and time-distributed layers are not reported: the backend runs them in a loop. The model's
    state (moving averages, random seeds) stays unchanged. `values` are pairs (variable, tensor that the pass reads in
    its place).
    """

    def watched(original: Callable[..., Any], layer: Any, args: tuple, kwargs: dict) -> Any:
        with _hearing_activation(layer) as heard:
            outputs = original(layer, *args, **kwargs)
        after = _first_float(outputs)
        if after is not None:
            # A layer that is itself an activation has no `activation` to wrap: its input is the value before it.
            alone = args and not hasattr(layer, "activation") and activation_of(layer) in LINKS
            before = args[0] if alone else after
            see(layer, heard[0] if heard else before, after)
        return outputs

    scope = keras.StatelessScope(collect_losses=True)
    for pair in values:
        # Given to the constructor, tensors would be cast to the type of their variables.
        scope.add_update(pair)
    with watching_outside_loops(watched), scope:
        return model(inputs, training=training)


@contextmanager
def _hearing_activation(layer: Any) -> Iterator[list[Any]]:
    """Yields a list that collects the inputs of the layer's activation function."""
    heard: list[Any] = []
    function = vars(layer).get("activation")
    if not callable(function):
        yield heard
        return

    def hearing(value: Any, *args: Any, **kwargs: Any) -> Any:
        heard.append(value)
        return function(value, *args, **kwargs)

    with patching.shadowed(layer, "activation", hearing):
        yield heard


def _first_float(structure: Any) -> Any:
    floats = (leaf for leaf in keras.tree.flatten(structure) if is_float(leaf))
    return next(floats, None)


def is_float(value: Any) -> bool:
    """Returns True if `value` is a tensor of floating-point numbers."""
    return hasattr(value, "dtype") and "float" in keras.backend.standardize_dtype(value.dtype)


def as_tensors(data: Any) -> Any:
    """Returns the structure `data` with its arrays converted to tensors."""
    return keras.tree.map_structure(ops.convert_to_tensor, data)


def spread(values: Any) -> Any:
    """Returns the standard deviation of all values, at least float32; its squares neither overflow nor underflow."""
    values = wide(values)
    scale = largest(values)
    return scale * ops.std(values / scale)


def wide(values: Any) -> Any:
    """Returns the values cast to at least float32."""
    return ops.cast(values, keras.backend.result_type(values.dtype, "float32"))


def largest(values: Any) -> Any:
    """Returns the largest magnitude among the values, or 1 if all values are zero."""
    magnitude = ops.max(ops.absolute(values))
    return ops.where(magnitude == 0, ops.ones_like(magnitude), magnitude)


def activation_of(layer: Any) -> str:
    """Returns the name of the layer's activation function, or its class name in lower case without one (`softmax`)."""
    function = getattr(layer, "activation", None)
    return getattr(function, "__name__", "") if function is not None else type(layer).__name__.lower()
