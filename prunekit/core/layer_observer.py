"""One pass of a model over real tensors, watched: what each layer puts out, and what goes into its activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras import ops

from prunekit.anatomy.layers import is_repeater
from prunekit.anatomy.watching import watching
from prunekit.core import patching

# Functions that losses undo where a model ends in them.
LINKS = ("softmax", "sigmoid")


def observe(model: Any, inputs: Any, see: Callable[[Any, Any, Any], None], *, training: bool = True) -> Any:
    """The model's outputs on `inputs`, while `see(layer, before, after)` is told of every call of a layer.

    `after` is the first floating-point tensor that the layer put out, and `before` the same before its activation
    function. Layers inside recurrent and time-distributed ones are not told of: the backend runs them in a loop. The
    model's state (moving averages, random seeds) is as it was afterwards.
    """
    inside: list[Any] = []

    def watched(original: Callable[..., Any], layer: Any, args: tuple, kwargs: dict) -> Any:
        if inside:
            return original(layer, *args, **kwargs)
        if is_repeater(layer):
            inside.append(layer)
        try:
            with _hearing_activation(layer) as heard:
                outputs = original(layer, *args, **kwargs)
        finally:
            inside.clear()
        after = _first_float(outputs)
        if after is not None:
            # An activation layer that has no function to hear is given what comes before it.
            alone = args and not hasattr(layer, "activation") and activation_of(layer) in LINKS
            before = args[0] if alone else after
            see(layer, heard[0] if heard else before, after)
        return outputs

    with watching(watched), keras.StatelessScope(collect_losses=True):
        return model(inputs, training=training)


@contextmanager
def _hearing_activation(layer: Any) -> Iterator[list[Any]]:
    """What the layer's activation function is given goes into the list."""
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
    """Whether it is a tensor of floating-point numbers."""
    return hasattr(value, "dtype") and "float" in keras.backend.standardize_dtype(value.dtype)


def as_tensors(data: Any) -> Any:
    """The structure of arrays as one of tensors."""
    return keras.tree.map_structure(ops.convert_to_tensor, data)


def spread(values: Any) -> Any:
    """Standard deviation of all values, as a tensor of at least float32; squares neither overflow nor vanish."""
    values = wide(values)
    scale = largest(values)
    return scale * ops.std(values / scale)


def wide(values: Any) -> Any:
    """The values as at least float32."""
    return ops.cast(values, keras.backend.result_type(values.dtype, "float32"))


def largest(values: Any) -> Any:
    """The largest magnitude; 1 where all are zero."""
    magnitude = ops.max(ops.absolute(values))
    return ops.where(magnitude == 0, ops.ones_like(magnitude), magnitude)


def activation_of(layer: Any) -> str:
    """Name of the layer's activation function; of its class, in lower case, where it is one (`Softmax`)."""
    function = getattr(layer, "activation", None)
    return getattr(function, "__name__", "") if function is not None else type(layer).__name__.lower()
