"""Finds backend variables that a layer holds and Keras does not track: no Keras optimizer trains them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from prunekit.anatomy.layers.layers import leaves_of


def raw_variables(layer: Any) -> list[str]:
    """Returns the attributes of `layer` with a `tf.Variable`, a `tf.Module` with variables or a `torch.nn.Parameter`.

    Attributes of sublayers are not included. JAX arrays are values, not variables, and are not included either.
    """
    if keras.backend.backend() == "torch":
        # Keras keeps the parameters of its own variables in a separate module.
        return [name for name, parameter in vars(layer).get("_parameters", {}).items() if parameter is not None]
    if keras.backend.backend() == "tensorflow":
        return [name for attribute in vars(layer) if not attribute.startswith("_") for name in _names(layer, attribute)]
    return []


def _names(layer: Any, attribute: str) -> Iterator[str]:
    import tensorflow as tf

    for leaf, suffix in leaves_of(vars(layer)[attribute], tf.Variable | tf.Module):
        if isinstance(leaf, tf.Variable):
            yield attribute + suffix
        # Keras layers, optimizers and metrics are instances of `tf.Module` too.
        elif not type(leaf).__module__.startswith("keras.") and not isinstance(leaf, keras.Layer):
            yield from (f"{attribute}{suffix}/{variable.name.split(':')[0]}" for variable in leaf.variables)
